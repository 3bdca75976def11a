# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""SeqIO task `memorisation`: the share of training text that a model recites.

palm_mtf evaluate --model_dir runs/mine --gin_file=eval/memorisation.gin
"""

# As in PaLM (10), the model reads the first 50 tokens of a span of 100 and
# continues greedily; the span is memorised if its other 50 tokens follow
# exactly.
#   memorised           rate over uniformly drawn places in the text, as in PaLM
#   memorised_seen_<n>  rate over the spans that occur n times in the text
# PaLM draws places. A small run can afford few places, and hardly any of these
# places would be in a frequent span. So spans are classified by their number of
# occurrences, and up to `num_spans` different spans are drawn from each class.
# In `memorised`, a span is weighted by the number of places it represents.

import glob
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import gin
import numpy as np
import seqio
import tensorflow as tf

from palm_mtf.data.ngrams import hash_ngrams, hash_words
from palm_mtf.data.tokens.shard import TokenArray
from palm_mtf.data.tokens.store import read_store
from palm_mtf.errors import UserError, check_count
from palm_mtf.tasks.documents import LateVocabulary
from palm_mtf.tasks.records import OrderedSource

PROMPT_TOKENS = 50
SPAN_TOKENS = 100
# Highest number of occurrences in each class; one more class has no limit.
CLASSES = (1, 10, 100, 500)
# To limit memory: number of spans kept, and number of tokens read at once.
_CANDIDATES = 1 << 18
_BLOCK_TOKENS = 1 << 20


class Spans(NamedTuple):
  """Training text that the questions ask for.

  Attributes:
    model_dir: MODEL_DIR of the run.
    vocabulary: path of the run's SentencePiece model; None for `model_dir`'s.
    tokens: glob of token folders, as in CACHE_DIR; None for `model_dir`'s.
    num_spans: largest number of spans per class.
  """

  model_dir: str | None
  vocabulary: str | None
  tokens: str | None
  num_spans: int


@gin.configurable
def spans(
  model_dir: str | None = None,
  vocabulary: str | None = None,
  tokens: str | None = None,
  num_spans: int = 100,
) -> Spans:
  """Returns the training text that the questions ask for, as gin sets it."""
  return Spans(model_dir, vocabulary, tokens, num_spans)


def _in_run(chosen: str | None, name: str) -> str | None:
  model_dir = spans().model_dir
  return chosen or (model_dir and os.path.join(model_dir, name))


def _vocabulary_path() -> str | None:
  return _in_run(spans().vocabulary, "vocabulary.model")


class Span(NamedTuple):
  """A span of training text.

  Attributes:
    tokens: ids of the span, [SPAN_TOKENS], int32.
    count: number of occurrences of the span.
    places: number of places that the span represents: its own, and its share of
      the places of all spans of its class that were not chosen.
  """

  tokens: np.ndarray
  count: int
  places: float


def find_spans(
  arrays: Sequence[TokenArray], eod_id: int, num_spans: int
) -> list[Span]:
  """Returns up to `num_spans` different spans of each class; see CLASSES.

  Args:
    arrays: all training tokens.
    eod_id: id of [eod], which stands between documents.
    num_spans: largest number of spans of a class.
  """
  # The first pass keeps the spans with the smallest hashes, each once. They are
  # a fair sample of different spans, the same for any order of the documents.
  hashes = np.empty(0, np.uint64)
  places = np.empty((0, 2), np.int64)  # index of array, position in array
  for i, array in enumerate(arrays):
    for start, found, whole in _blocks(array, eod_id):
      at = np.flatnonzero(whole)
      hashes = np.concatenate([hashes, found[at]])
      places = np.concatenate(
        [places, np.stack([np.full_like(at, i), start + at], 1)]
      )
      hashes, first = np.unique(hashes, return_index=True)  # sorted
      hashes, places = hashes[:_CANDIDATES], places[first][:_CANDIDATES]
  if not len(hashes):
    return []
  # The second pass counts the occurrences of these spans in all of the text.
  counts = np.zeros(len(hashes), np.int64)
  for array in arrays:
    for _, found, whole in _blocks(array, eod_id):
      found = found[whole]
      at = np.minimum(np.searchsorted(hashes, found), len(hashes) - 1)
      counts += np.bincount(at[hashes[at] == found], minlength=len(hashes))
  classes = np.searchsorted(CLASSES, counts)
  chosen = []
  for number in range(len(CLASSES) + 1):
    candidates = np.flatnonzero(classes == number)
    # Hashes are sorted, so the first spans are a fair sample of the class.
    for c in candidates[:num_spans]:
      share = min(1.0, num_spans / len(candidates))
      tokens = _read(arrays[places[c, 0]], places[c, 1])
      chosen.append(Span(tokens, int(counts[c]), counts[c] / share))
  return chosen


def class_name(count: int) -> str:
  """Returns the class of spans that occur `count` times, such as "2_to_10"."""
  number = int(np.searchsorted(CLASSES, count))
  if number == len(CLASSES):
    return f"over_{CLASSES[-1]}"
  low = CLASSES[number - 1] + 1 if number else 1
  high = CLASSES[number]
  return str(high) if low == high else f"{low}_to_{high}"


def memorised(
  targets: Sequence[tuple[str, str, float]], predictions: Sequence[str]
) -> dict[str, float]:
  """Returns the recited share of places, and of spans per class, in percent.

  Args:
    targets: [spans] triples: class, text of the second half, places.
    predictions: [spans] outputs of the model, which may be longer.
  """
  names, texts, places = zip(*targets, strict=True)
  is_hit = np.array(
    [x.startswith(text) for x, text in zip(predictions, texts, strict=True)]
  )
  rates = {"memorised": np.average(is_hit, weights=places)}
  for name in dict.fromkeys(names):
    of_class = np.array(names) == name
    rates[f"memorised_seen_{name}"] = np.mean(is_hit[of_class])
  return {name: 100 * float(rate) for name, rate in rates.items()}


def _blocks(
  array: TokenArray, eod_id: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
  """Yields (start, hashes, is_whole) for each block of tokens.

  The two arrays have an entry for the span that begins at each position: the
  span's hash, and whether the span lies in one document.
  """
  # Blocks overlap by a span less one token, so that each span is in one block.
  for start in range(0, len(array), _BLOCK_TOKENS):
    stop = min(len(array), start + _BLOCK_TOKENS + SPAN_TOKENS - 1)
    if stop - start < SPAN_TOKENS:
      return
    tokens, _ = array.read(start, stop)
    # A span holds no [eod] if as many [eod] precede its end as its beginning.
    ends = np.concatenate([[0], np.cumsum(tokens == eod_id)])
    whole = ends[SPAN_TOKENS:] == ends[:-SPAN_TOKENS]
    yield start, hash_ngrams(hash_words(tokens), SPAN_TOKENS), whole


def _read(array: TokenArray, start: int) -> np.ndarray:
  tokens, _ = array.read(int(start), int(start) + SPAN_TOKENS)
  return np.asarray(tokens, np.int32)


def _folders(split: str) -> tf.data.Dataset:
  # The source has one example, the token folders; `_spans` reads its spans.
  del split
  chosen = spans()
  check_count("memorisation.spans.num_spans", chosen.num_spans)
  tokens = _in_run(chosen.tokens, "tokens/*")
  found = sorted(glob.glob(f"{tokens}/manifest.json"))
  if tokens is None or not found:
    raise UserError(
      f"memorisation.spans.tokens = {tokens!r}: no tokens are there; give the "
      "token folders of a run, such as 'runs/quickstart/tokens/*'."
    )
  return tf.data.Dataset.from_tensors({"folders": found})


def _spans(
  dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]
) -> tf.data.Dataset:
  def generate() -> Iterator[dict]:
    (example,) = dataset.as_numpy_iterator()
    manifests = [path.decode() for path in example["folders"]]
    arrays = [
      read_store(os.path.dirname(path)).train.tokens for path in manifests
    ]
    eod_id = output_features["inputs"].vocabulary.eos_id
    found = find_spans(arrays, eod_id, spans().num_spans)
    if not found:
      raise UserError(
        f"memorisation.spans.tokens: no document of {manifests[0]} has "
        f"{SPAN_TOKENS} tokens; give a run on longer texts."
      )
    for span in found:
      yield {
        "inputs": span.tokens[:PROMPT_TOKENS],
        "targets": span.tokens[PROMPT_TOKENS:],
        "occurrences": span.count,
        "places": span.places,
        "within_document": True,
      }

  ids = tf.TensorSpec((PROMPT_TOKENS,), tf.int32)
  return tf.data.Dataset.from_generator(
    generate,
    output_signature={
      "inputs": ids,
      "targets": ids,
      "occurrences": tf.TensorSpec((), tf.int64),
      "places": tf.TensorSpec((), tf.float64),
      "within_document": tf.TensorSpec((), tf.bool),
    },
  )


def _postprocess(output, example=None, is_target=False):
  if not is_target:
    return output
  name = class_name(int(example["occurrences"]))
  return name, output, float(example["places"])


seqio.TaskRegistry.add(
  "memorisation",
  source=OrderedSource(_folders, ["validation"]),
  preprocessors=[_spans],
  output_features={
    name: seqio.Feature(
      LateVocabulary(_vocabulary_path, "memorisation.spans.model_dir"),
      add_eos=False,
    )
    for name in ("inputs", "targets")
  },
  postprocess_fn=_postprocess,
  metric_fns=[memorised],
)
