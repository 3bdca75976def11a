# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf score`: prints how likely the newest checkpoint finds texts.

--text, other files   a document
FILE.tsv              per line: inputs, a tab, and targets; or several targets
                      (options), separated by tabs
FILE.jsonl            per line: {"text": ...}, {"inputs": ..., "targets": ...}
                      or {"inputs": ..., "options": [...]}

A document is scored byte for byte, as TEXT_FILES trains it, including a byte
order mark at its beginning.
"""

import dataclasses
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.named_weights import find_weights
from palm_mtf.checkpoints.teacher import teacher_model
from palm_mtf.checkpoints.weights_to_load import open_newest, settings_of
from palm_mtf.commands.adapter import add_adapter
from palm_mtf.config import Config, ModelConfig, mesh_layout
from palm_mtf.config.neighbours import refuse_neighbours
from palm_mtf.console import format_table
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import log_dtype, resolve_dtype
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.user_text import (
  check_text,
  format_of,
  read_json_lines,
  read_lines,
  read_text,
)

if TYPE_CHECKING:  # the module imports TensorFlow
  from palm_mtf.generation.inference.scorer import Divergence

_FORMS = (
  'give {"text": "..."}, {"inputs": "...", "targets": "..."} or {"inputs": '
  '"...", "options": ["...", "..."]}'
)


@dataclasses.dataclass(frozen=True)
class ScoreItem:
  """A document to score; or inputs, and a target or options to score."""

  origin: str  # file and line, for messages
  inputs: str  # "" for a document
  targets: tuple[str, ...]  # one target, or the options
  kind: str  # what is scored: "text" (a document), "targets" or "options"


def read_items(path: str) -> list[ScoreItem]:
  """Returns the items of a .jsonl or .tsv file; any other file is a document.

  Raises UserError if the file cannot be read, is empty, or a line is no item.
  """
  what, needed = f"--input = {path!r}", "there has to be a text to score"
  # Inputs and targets can have newlines or tabs only in JSON.
  if format_of(path) == ".jsonl":
    lines = read_json_lines(path, what, _FORMS, needed=needed)
    return [_read_json_item(line, at, f"{path}:{n}") for n, at, line in lines]
  if format_of(path) == ".tsv":
    lines = read_lines(path, what, needed)
    return [_read_tsv_item(line, at, f"{path}:{n}") for n, at, line in lines]
  document = read_text(path, what, needed, keeps_mark=True)
  return [ScoreItem(path, "", (document,), "text")]


def _read_tsv_item(line: str, what: str, origin: str) -> ScoreItem:
  inputs, *targets = line.split("\t")
  if not targets:
    raise UserError(
      f"{what} has no tab; write inputs, a tab and targets, or options with "
      "tabs between them."
    )
  kind = "options" if len(targets) > 1 else "targets"
  return _check(ScoreItem(origin, inputs, tuple(targets), kind), what)


def _read_json_item(
  fields: Mapping[str, object], what: str, origin: str
) -> ScoreItem:
  named = {"text", "inputs", "targets", "options"} & set(fields)
  if named not in ({"text"}, {"inputs", "targets"}, {"inputs", "options"}):
    raise UserError(f"{what} has the fields {sorted(fields)}; {_FORMS}.")
  if "options" in named and not isinstance(fields["options"], list):
    raise UserError(f"{what}: 'options' is not a list of texts; {_FORMS}.")
  for name in sorted(named):
    value = fields[name]
    for text in value if name == "options" else [value]:
      check_text(text, f"{what}: {name!r}", _FORMS)
  if named == {"text"}:
    if not fields["text"]:
      raise UserError(f"{what}: 'text' is empty; {_FORMS}.")
    return ScoreItem(origin, "", (fields["text"],), "text")
  (kind,) = named - {"inputs"}
  targets = fields[kind] if kind == "options" else [fields[kind]]
  return _check(ScoreItem(origin, fields["inputs"], tuple(targets), kind), what)


def _check(item: ScoreItem, what: str) -> ScoreItem:
  if not item.inputs:
    raise UserError(
      f'{what}: inputs are empty; give some, or the targets as {{"text": ...}} '
      "of a JSON line."
    )
  if not item.targets or not all(item.targets):
    raise UserError(
      f"{what}: targets are empty; there has to be a text to score."
    )
  return item


_SHOWN_CHARACTERS = 40


def score(
  *,
  model_dir: str,
  config: Config,
  texts: Sequence[str] | None = None,
  input_files: Sequence[str] | None = None,
  adapter: str | None = None,
  against: str | None = None,
  as_json: bool = False,
) -> None:
  """Prints log-likelihoods, in nats, of documents, targets or options.

  `against` is the path of a run or checkpoint, with which to compare.
  """
  if against:
    refuse_neighbours(config.model, f"--against = {against!r}")
  if against and config.decode.knn_index:
    raise UserError(
      f"--against = {against!r}: compares models without KNN_INDEX = "
      f"{config.decode.knn_index!r}; leave one of them out."
    )
  config, checkpoint, vocabulary, items, encoded = open_texts(
    model_dir, config, texts, input_files, adapter
  )
  log_dtype(config.model, config.mesh_layout)
  given = checkpoint, config, vocabulary, encoded
  found = []
  if against:
    found = _compare(*given, *open_other(against, config, vocabulary))
  likelihoods = (-math.fsum(x.loss.tolist()) for x in found)
  if not against:
    likelihoods = compute_log_likelihoods(*given)
  records = []
  for item, examples in zip(items, encoded, strict=True):
    scores = [
      _score(next(likelihoods), len(ids), len(text.encode()), item.kind)
      for (_, ids), text in zip(examples, item.targets, strict=True)
    ]
    has_options = item.kind == "options"
    one = (
      {**_find_best(scores), "options": scores} if has_options else scores[0]
    )
    records.append({"origin": item.origin, **one})
  totals = [*_sum_scores(items, records)]
  if as_json:
    dtype = {"activation_dtype": config.model.activation_dtype}
    for record in [*records, *totals]:
      print(json_text(record | dtype))
  else:
    _print_table(items, records, totals)
  if against:
    numbers = describe_divergence(found)
    more = {"against": against} | numbers
    rows = [(x.replace("_", " "), f"{y:.6g}") for x, y in numbers.items()]
    table = f"against {against}\n{format_table(rows, '<>')}"
    print(json_text(more) if as_json else table)


# Per item and target: token ids of the inputs, and of the target.
Encoded = list[list[tuple[list[int], list[int]]]]


def open_texts(
  model_dir: str,
  config: Config,
  texts: Sequence[str] | None,
  input_files: Sequence[str] | None,
  adapter: str | None,
) -> tuple[Config, Checkpoint, Vocabulary, list[ScoreItem], Encoded]:
  """Returns the settings and what they name, with all texts, also as tokens."""
  mesh_layout.check_layout(config.mesh_layout, config.model)
  model = resolve_dtype(config.model, config.mesh_layout)
  config = dataclasses.replace(config, model=model)
  if not texts and not input_files:
    raise UserError(
      "nothing to score: give at least one --text TEXT, or --input FILE."
    )
  texts = texts or []
  if not all(texts):
    raise UserError("--text = '': is empty; there has to be a text to score.")
  items = [
    ScoreItem(f"--text {number}", "", (text,), "text")
    for number, text in enumerate(texts, 1)
  ]
  for path in input_files or []:
    items += read_items(path)
  checkpoint, vocabulary = open_newest(model_dir, config)
  config, checkpoint = add_adapter(adapter, config, checkpoint)
  model, stride = config.model, config.evaluation.stride
  if stride is not None and stride > model.text_length:
    raise UserError(
      f"STRIDE = {stride}: tokens would be left out; give at most "
      f"{model.text_room}."
    )
  encoded = _encode(items, vocabulary, model)
  return config, checkpoint, vocabulary, items, encoded


def _encode(
  items: Sequence[ScoreItem], vocabulary: Vocabulary, model: ModelConfig
) -> Encoded:
  # Encode inputs and targets separately, as in training, because the model has
  # never seen a piece that spans both. Encode all texts in one call, so that
  # the tokenizer uses several threads.
  texts = [text for item in items for text in (item.inputs, *item.targets)]
  encoded = iter(vocabulary.encode_batch(texts))
  found = []
  for item in items:
    inputs = next(encoded)
    pairs = [(inputs, next(encoded)) for _ in item.targets]
    longest = max(len(inputs) + len(ids) for _, ids in pairs)
    # A document may be longer than SEQUENCE_LENGTH, because it is scored in
    # windows. Other items may not, because windows would truncate their inputs.
    if item.kind != "text" and longest > model.text_length:
      raise UserError(
        f"{item.origin}: inputs and targets are {longest:,} tokens, more than "
        f"{model.text_room}: shorten the inputs."
      )
    found.append(pairs)
  return found


def compute_log_likelihoods(
  checkpoint: Checkpoint,
  config: Config,
  vocabulary: Vocabulary,
  encoded: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]],
) -> Iterator[float]:
  """Yields log p, in nats, of the last ids of each pair after the first."""
  from palm_mtf.generation.inference.scorer import Example, make_scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder
  from palm_mtf.rates.measure import warn_if_slow

  # The scorer yields (index of an example, log p) in any order, so collect the
  # pairs in a dict to restore the order of `examples`.
  examples = [Example(*pair) for pairs in encoded for pair in pairs]
  model, mesh = config.model, config.mesh_layout
  warn_if_slow(model, mesh)
  with LoadedDecoder.of_run(checkpoint, config) as loaded:
    scorer = make_scorer(loaded, config, vocabulary)
    found = dict(scorer.log_likelihoods(examples))
  return (found[index] for index in range(len(examples)))


def _compare(
  checkpoint: Checkpoint,
  config: Config,
  vocabulary: Vocabulary,
  encoded: Sequence[Sequence[tuple[list[int], list[int]]]],
  other: Checkpoint,
  config_of_other: Config,
) -> list["Divergence"]:
  from palm_mtf.generation.inference.scorer import Example, make_scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder

  with (
    LoadedDecoder.of_run(checkpoint, config) as ours,
    LoadedDecoder.of_run(other, config_of_other) as theirs,
  ):
    scorer = make_scorer(ours, config, vocabulary)
    reference = make_scorer(theirs, config_of_other, vocabulary)
    examples = [Example(*pair) for pairs in encoded for pair in pairs]
    return [scorer.divergence(x, reference) for x in examples]


def _score(
  log_likelihood: float, num_tokens: int, num_bytes: int, kind: str
) -> dict[str, float]:
  """Returns totals, averages and perplexity of one or several texts."""
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
  """Yields the `_score` of all documents, and of all targets, together."""
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
  head = ("log likelihood", "tokens", "bytes", "per token", "perplexity")
  rows = [(*head, "bits/byte", "text")]
  for item, record in zip(items, records, strict=True):
    for number, score in enumerate(record.get("options", [record])):
      text = _shorten(item.targets[number])
      if item.inputs:
        text = f"{_shorten(item.inputs)} -> {text}"
      best = "  <- best" if record.get("best") == number else ""
      rows.append((*_format_numbers(score), f"{item.origin}: {text}{best}"))
  rows += [(*_format_numbers(total), total["origin"]) for total in totals]
  print(format_table(rows, ">>>>>><"))


def _format_numbers(score: dict) -> tuple[str, ...]:
  has_all = "perplexity" in score
  return (
    f"{score['log_likelihood']:.4f}",
    f"{score['tokens']:,}",
    f"{score['bytes']:,}",
    f"{score['per_token']:.4f}",
    f"{score['perplexity']:.4g}" if has_all else "",
    f"{score['bits_per_byte']:.4f}" if has_all else "",
  )


def _shorten(text: str) -> str:
  if len(text) <= _SHOWN_CHARACTERS:
    return repr(text)
  return f"{text[:_SHOWN_CHARACTERS]!r}..."


def open_other(
  path: str, config: Config, vocabulary: Vocabulary
) -> tuple[Checkpoint, Config]:
  """Returns the checkpoint that --against names, held open, and its settings.

  Its weights are used as they are, not as int8 or int4.

  Raises UserError if it is missing, damaged, or has another vocabulary, or if
  it reads shorter texts.
  """
  weights = find_weights("--against", path)
  found, given = weights.checkpoint, weights.given
  if not found:
    raise UserError(
      f"{given}: is no checkpoint of palm_mtf; import the model first."
    )
  found = dataclasses.replace(found, held=weights.files)
  model = teacher_model(found, config.model)
  refuse_neighbours(model, given)
  if model.vocab_size != config.model.vocab_size or not _is_same(
    found, vocabulary
  ):
    raise UserError(
      f"{given}: {weights.place} has another vocabulary than MODEL_DIR; "
      "compare models whose tokens mean the same."
    )
  length = config.model.sequence_length
  if model.positions != "learned":  # it can read rows of any length
    model = dataclasses.replace(model, sequence_length=length)
  if model.sequence_length < length:
    raise UserError(
      f"SEQUENCE_LENGTH = {length:,}: {weights.place} reads at most "
      f"{model.sequence_length:,} tokens; lower it."
    )
  try:
    mesh_layout.check_layout(config.mesh_layout, model)
  except UserError as error:
    raise UserError(f"{given}: {weights.place}: {error}") from None
  decode = dataclasses.replace(config.decode, weight_dtype="activation")
  return found, dataclasses.replace(config, model=model, decode=decode)


def _is_same(checkpoint: Checkpoint, vocabulary: Vocabulary) -> bool:
  # Imports of one model from two formats have tokenizer files that differ.
  if checkpoint.manifest.vocabulary_sha256 == vocabulary.sha256:
    return True
  run = os.path.dirname(os.path.dirname(checkpoint.path))
  settings = settings_of(checkpoint.manifest)
  path = settings.get("VOCABULARY") or ModelDir(run).vocabulary
  other = open_vocabulary(str(path), setting="--against")
  if (other.size, other.eod_id) != (vocabulary.size, vocabulary.eod_id):
    return False
  ids = range(other.size)
  return all(other.piece(x) == vocabulary.piece(x) for x in ids)


def describe_divergence(found: Sequence["Divergence"]) -> dict[str, float]:
  """Returns statistics of all tokens of several texts."""
  each = map(np.concatenate, zip(*found, strict=True))
  loss, loss_of_other, kl, agrees = each
  return {
    "tokens": len(kl),
    "perplexity": float(np.exp(loss.mean())),
    "perplexity_of_other": float(np.exp(loss_of_other.mean())),
    "kl_divergence": float(kl.mean()),
    "kl_divergence_99th": float(np.percentile(kl, 99)),
    "top_1_agreement": float(agrees.mean()),
  }
