# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf score`: how likely texts are, by the newest checkpoint."""

import json
import math
from collections.abc import Iterator, Sequence

from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  check_same_model,
  newest_checkpoint,
)
from palm_mtf.config import Config, MeshLayout, PalmConfig, mesh_layout
from palm_mtf.data.vocabulary.vocabulary import Vocabulary, load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.inference.score_inputs import ScoreItem, given_texts, read_items
from palm_mtf.machine.activation_dtype import resolved
from palm_mtf.model_dir.atomic_files import check_model_dir

_SHOWN_CHARACTERS = 40


def score(
  *,
  model_dir: str,
  config: Config,
  texts: Sequence[str] | None = None,
  input_files: Sequence[str] | None = None,
  as_json: bool = False,
) -> None:
  """Prints log-likelihoods, in nats, of texts, targets or options.

  Of documents also perplexity, exp(-log_likelihood / tokens), and bits per
  byte, -log_likelihood / ln(2) / bytes. [eod] is not scored.

  Args:
    model_dir: MODEL_DIR of a training run.
    config: every setting; those of training are not read.
    texts: documents.
    input_files: see inference/score_inputs.py.
    as_json: print one JSON object a line instead of a table.

  Raises:
    UserError: there is no checkpoint or no text, the checkpoint is of another
      model, or inputs and targets are longer than the sequence length.
  """
  check_model_dir(model_dir)
  mesh = config.mesh_layout
  mesh_layout.check(mesh, config.model)
  model = resolved(config.model, mesh)
  stride = config.evaluation.stride
  _check_stride(stride, model)
  if not texts and not input_files:
    raise UserError(
      "nothing to score: give at least one --text TEXT, or --input FILE."
    )
  items = given_texts(texts or [])
  for path in input_files or []:
    items += read_items(path)
  shapes = parameter_shapes(model)
  checkpoint = newest_checkpoint(model_dir, shapes)
  vocabulary = load_vocabulary(
    model_dir, config.data, vocab_size=model.vocab_size
  )
  check_same_model(checkpoint, shapes, vocabulary.sha256)
  encoded = _encode(items, vocabulary, model)
  # All input is known to be good; TensorFlow takes seconds.
  likelihoods = _log_likelihoods(checkpoint, model, mesh, encoded, stride)
  records = []
  for item, examples in zip(items, encoded, strict=True):
    scores = [
      _score(next(likelihoods), len(ids), text)
      for (_, ids), text in zip(examples, item.targets, strict=True)
    ]
    records.append(_record(item, scores))
  totals = [*_totals(items, records)]
  if as_json:
    for record in [*records, *totals]:
      print(json.dumps(record))
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
  """Returns the ids of inputs and targets, for each of the targets."""
  texts = [text for item in items for text in (item.inputs, *item.targets)]
  encoded = iter(vocabulary.encode_batch(texts))
  found = []
  for item in items:
    inputs = next(encoded)
    pairs = [(inputs, next(encoded)) for _ in item.targets]
    longest = max(len(given) + len(ids) for given, ids in pairs)
    if item.kind != "text" and longest > model.sequence_length:
      raise UserError(
        f"{item.origin}: inputs and targets are {longest:,} tokens, more than "
        f"SEQUENCE_LENGTH = {model.sequence_length:,}: shorten the inputs."
      )
    found.append(pairs)
  return found


def _log_likelihoods(
  checkpoint: Checkpoint,
  model: PalmConfig,
  mesh: MeshLayout,
  encoded: Sequence[Sequence[tuple[list[int], list[int]]]],
  stride: int | None,
) -> Iterator[float]:
  from palm_mtf.inference.decoder_session import LoadedDecoder
  from palm_mtf.inference.scorer import Example, Scorer
  from palm_mtf.mesh.session import session_config
  from palm_mtf.rates.bfloat16_slowdown import warn_if_slow

  examples = [Example(*pair) for pairs in encoded for pair in pairs]
  warn_if_slow(model, mesh, session_config(mesh.num_devices))
  with LoadedDecoder(checkpoint, model, mesh) as loaded:
    found = dict(Scorer(loaded, stride).log_likelihoods(examples))
  return (found[index] for index in range(len(examples)))


def _score(log_likelihood: float, num_tokens: int, text: str) -> dict:
  return {
    "log_likelihood": log_likelihood,
    "tokens": num_tokens,
    "bytes": len(text.encode()),
    "per_token": log_likelihood / num_tokens,
  }


def _record(item: ScoreItem, scores: Sequence[dict]) -> dict:
  if item.kind == "options":
    return {"origin": item.origin, **_best(scores), "options": scores}
  record = {"origin": item.origin, **scores[0]}
  return {**record, **_of_text(record)} if item.kind == "text" else record


def _best(scores: Sequence[dict]) -> dict[str, int]:
  """Returns which option is the likeliest, in all, a token and a byte."""

  def place_of(likelihoods: list[float]) -> int:
    return likelihoods.index(max(likelihoods))

  return {
    "best": place_of([x["log_likelihood"] for x in scores]),
    "best_per_token": place_of([x["per_token"] for x in scores]),
    "best_per_byte": place_of(
      [x["log_likelihood"] / x["bytes"] for x in scores]
    ),
  }


def _of_text(score: dict) -> dict[str, float]:
  return {
    "perplexity": math.exp(min(-score["per_token"], 700.0)),
    "bits_per_byte": -score["log_likelihood"] / math.log(2) / score["bytes"],
  }


def _totals(
  items: Sequence[ScoreItem], records: Sequence[dict]
) -> Iterator[dict]:
  """Yields the sums over all documents, and over all targets."""
  for kind in ("text", "targets"):
    some = [
      record
      for item, record in zip(items, records, strict=True)
      if item.kind == kind
    ]
    if len(some) < 2:
      continue
    total = {name: sum(x[name] for x in some) for name in ("tokens", "bytes")}
    likelihood = math.fsum(x["log_likelihood"] for x in some)
    total = {
      "origin": f"all {len(some)} {'documents' if kind == 'text' else kind}",
      "log_likelihood": likelihood,
      **total,
      "per_token": likelihood / total["tokens"],
    }
    yield {**total, **_of_text(total)} if kind == "text" else total


def _print_table(
  items: Sequence[ScoreItem],
  records: Sequence[dict],
  totals: Sequence[dict],
) -> None:
  print(
    f"{'log likelihood':>14}  {'tokens':>8}  {'bytes':>8}  {'a token':>8}  "
    f"{'perplexity':>10}  {'bits/byte':>9}  text"
  )
  for item, record in zip(items, records, strict=True):
    for number, score in enumerate(record.get("options", [record])):
      text = _shown(item.targets[number])
      if item.inputs:
        text = f"{_shown(item.inputs)} -> {text}"
      best = "  <- best" if record.get("best") == number else ""
      print(f"{_line(score)}  {item.origin}: {text}{best}")
  for total in totals:
    print(f"{_line(total)}  {total['origin']}")


def _line(score: dict) -> str:
  numbers = (
    f"{score['log_likelihood']:14.4f}  {score['tokens']:8,}  "
    f"{score['bytes']:8,}  {score['per_token']:8.4f}  "
  )
  if "perplexity" not in score:
    return f"{numbers}{'':10}  {'':9}"
  return f"{numbers}{score['perplexity']:10.4g}  {score['bits_per_byte']:9.4f}"


def _shown(text: str) -> str:
  if len(text) <= _SHOWN_CHARACTERS:
    return repr(text)
  return f"{text[:_SHOWN_CHARACTERS]!r}..."
