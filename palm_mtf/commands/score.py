# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf score`: prints how likely the newest checkpoint finds texts."""

import math
from collections.abc import Callable, Iterator, Sequence

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.same_model import open_newest
from palm_mtf.config import Config, MeshLayout, PalmConfig, mesh_layout
from palm_mtf.data.batches.packing import document_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.score_inputs import (
  ScoreItem,
  make_text_items,
  read_items,
)
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import log_dtype, resolve_dtype

_SHOWN_CHARACTERS = 40


def score(
  *,
  model_dir: str,
  config: Config,
  texts: Sequence[str] | None = None,
  input_files: Sequence[str] | None = None,
  as_json: bool = False,
) -> None:
  """Prints log-likelihoods, in nats, of documents, targets or options."""
  mesh = config.mesh_layout
  mesh_layout.check_layout(mesh, config.model)
  model = resolve_dtype(config.model, mesh)
  stride = config.evaluation.stride
  _check_stride(stride, model)
  if not texts and not input_files:
    raise UserError(
      "nothing to score: give at least one --text TEXT, or --input FILE."
    )
  items = make_text_items(texts or [])
  for path in input_files or []:
    items += read_items(path)
  checkpoint, vocabulary = open_newest(model_dir, config)
  encoded = _encode(items, vocabulary, model)
  log_dtype(model, mesh)
  start_id = document_start(config.data.packing, vocabulary.eod_id)
  likelihoods = _compute_log_likelihoods(
    checkpoint, model, mesh, encoded, stride=stride, start_id=start_id
  )
  records = []
  for item, examples in zip(items, encoded, strict=True):
    scores = [
      _score(next(likelihoods), len(ids), len(text.encode()), item.kind)
      for (_, ids), text in zip(examples, item.targets, strict=True)
    ]
    one = scores[0]
    if item.kind == "options":
      one = {**_find_best(scores), "options": scores}
    records.append({"origin": item.origin, **one})
  totals = [*_sum_scores(items, records)]
  if as_json:
    dtype = {"activation_dtype": model.activation_dtype}
    for record in [*records, *totals]:
      print(json_text(record | dtype))
  else:
    _print_table(items, records, totals)


def _check_stride(stride: int | None, model: PalmConfig) -> None:
  if stride is not None and stride > model.sequence_length:
    raise UserError(
      f"STRIDE = {stride}: tokens would be left out; give at most "
      f"SEQUENCE_LENGTH = {model.sequence_length}."
    )


def _encode(
  items: Sequence[ScoreItem], vocabulary: Vocabulary, model: PalmConfig
) -> list[list[tuple[list[int], list[int]]]]:
  """Returns, for each item, a list of (ids of inputs, ids of one target)."""
  # Encode inputs and targets separately, as in training, because the model has
  # never seen a piece that spans both. Encode all texts in one call, so that
  # SentencePiece uses several threads.
  texts = [text for item in items for text in (item.inputs, *item.targets)]
  encoded = iter(vocabulary.encode_batch(texts))
  found = []
  for item in items:
    inputs = next(encoded)
    pairs = [(inputs, next(encoded)) for _ in item.targets]
    longest = max(len(given) + len(ids) for given, ids in pairs)
    # A document may be longer than SEQUENCE_LENGTH, because it is scored in
    # windows. Windows would truncate inputs, so other items may not be longer.
    if item.kind != "text" and longest > model.sequence_length:
      raise UserError(
        f"{item.origin}: inputs and targets are {longest:,} tokens, more than "
        f"SEQUENCE_LENGTH = {model.sequence_length:,}: shorten the inputs."
      )
    found.append(pairs)
  return found


def _compute_log_likelihoods(
  checkpoint: Checkpoint,
  model: PalmConfig,
  mesh: MeshLayout,
  encoded: Sequence[Sequence[tuple[list[int], list[int]]]],
  *,
  stride: int | None,
  start_id: int,
) -> Iterator[float]:
  # Import TensorFlow, which takes seconds, only after all checks.
  from palm_mtf.generation.inference.scorer import Example, Scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder
  from palm_mtf.rates.measure import warn_if_slow

  # The scorer yields (index of an example, log p) in any order, so collect the
  # pairs in a dict to restore the order of `examples`.
  examples = [Example(*pair) for pairs in encoded for pair in pairs]
  warn_if_slow(model, mesh)
  with LoadedDecoder(checkpoint, model, mesh) as loaded:
    found = dict(Scorer(loaded, stride, start_id).log_likelihoods(examples))
  return (found[index] for index in range(len(examples)))


def _score(
  log_likelihood: float, num_tokens: int, num_bytes: int, kind: str
) -> dict[str, float]:
  """Returns the figures of one text, or of several texts together."""
  per_token = log_likelihood / num_tokens
  score = {
    "log_likelihood": log_likelihood,
    "tokens": num_tokens,
    "bytes": num_bytes,
    "per_token": per_token,
  }
  # Perplexity and bits per byte are meaningful only for whole documents.
  if kind == "text":
    # Limit the exponent, because exp(710) overflows float64.
    score["perplexity"] = math.exp(min(-per_token, 700.0))
    score["bits_per_byte"] = -log_likelihood / math.log(2) / num_bytes
  return score


def _find_best(scores: Sequence[dict]) -> dict[str, int]:
  """Returns which option is likeliest in total, per token and per byte."""

  def best(value: Callable[[dict], float]) -> int:
    return max(range(len(scores)), key=lambda i: value(scores[i]))

  return {
    "best": best(lambda x: x["log_likelihood"]),
    "best_per_token": best(lambda x: x["per_token"]),
    "best_per_byte": best(lambda x: x["log_likelihood"] / x["bytes"]),
  }


def _sum_scores(
  items: Sequence[ScoreItem], records: Sequence[dict]
) -> Iterator[dict]:
  """Yields figures for all documents together, and for all targets together."""
  for kind, what in (("text", "documents"), ("targets", "targets")):
    pairs = zip(items, records, strict=True)
    some = [record for item, record in pairs if item.kind == kind]
    if len(some) > 1:
      # Compute perplexity and bits per byte from sums over all tokens, because
      # a mean over documents would give short and long documents equal weight.
      sums = (sum(x[name] for x in some) for name in ("tokens", "bytes"))
      log_likelihood = math.fsum(x["log_likelihood"] for x in some)
      score = _score(log_likelihood, *sums, kind)
      yield {"origin": f"all {len(some)} {what}", **score}


def _print_table(
  items: Sequence[ScoreItem],
  records: Sequence[dict],
  totals: Sequence[dict],
) -> None:
  print(
    f"{'log likelihood':>14}  {'tokens':>8}  {'bytes':>8}  {'per token':>9}  "
    f"{'perplexity':>10}  {'bits/byte':>9}  text"
  )
  for item, record in zip(items, records, strict=True):
    for number, score in enumerate(record.get("options", [record])):
      text = _shorten(item.targets[number])
      if item.inputs:
        text = f"{_shorten(item.inputs)} -> {text}"
      best = "  <- best" if record.get("best") == number else ""
      print(f"{_format_line(score)}  {item.origin}: {text}{best}")
  for total in totals:
    print(f"{_format_line(total)}  {total['origin']}")


def _format_line(score: dict) -> str:
  numbers = (
    f"{score['log_likelihood']:14.4f}  {score['tokens']:8,}  "
    f"{score['bytes']:8,}  {score['per_token']:9.4f}  "
  )
  if "perplexity" not in score:
    return f"{numbers}{'':10}  {'':9}"
  return f"{numbers}{score['perplexity']:10.4g}  {score['bits_per_byte']:9.4f}"


def _shorten(text: str) -> str:
  if len(text) <= _SHOWN_CHARACTERS:
    return repr(text)
  return f"{text[:_SHOWN_CHARACTERS]!r}..."
