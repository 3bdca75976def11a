# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`palm_mtf evaluate`: prints the loss or the task metrics of checkpoints.

With --golden FILE, it compares log p with recorded ones. A line of FILE is
{"text": ...}. If a line has no "log_p", the command adds it, and what else
`now` has. Other fields are kept.
"""

# If EVAL_TASKS names SeqIO tasks, the command computes their metrics for each
# checkpoint that EVAL_CHECKPOINTS selects. Otherwise it computes the validation
# loss of the newest checkpoint.

import collections
import dataclasses
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from palm_mtf.architecture.parameters import saved_shapes
from palm_mtf.assertions.assertions import Assertions
from palm_mtf.checkpoints import manifest, weights_to_load
from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.commands.adapter import add_adapter
from palm_mtf.commands.score import compute_log_likelihoods
from palm_mtf.config import Config, mesh_layout
from palm_mtf.config.task_eval import EVERY, NEWEST, TaskEvalConfig
from palm_mtf.console import print_results
from palm_mtf.data.batches.corpus import (
  Batch,
  corpus_of_run,
  split_batch,
  unigram_entropy,
)
from palm_mtf.data.sources.files import check_unchanged, describe_file
from palm_mtf.data.vocabulary.load import load_vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.prompts import check_room
from palm_mtf.json_text import json_text
from palm_mtf.machine.activation_dtype import log_dtype, resolve_dtype
from palm_mtf.model_dir.json_lines import write_json_lines
from palm_mtf.model_dir.paths import step_of
from palm_mtf.user_text import check_text, read_json_lines, short_json

if TYPE_CHECKING:  # the module imports TensorFlow, which takes seconds
  from palm_mtf.evaluation.evaluator import TaskOutcome

_logger = logging.getLogger(__name__)


def evaluate(
  *,
  model_dir: str,
  config: Config,
  golden: str | None = None,
  adapter: str | None = None,
  as_json: bool = False,
) -> int:
  """Prints the metrics of EVAL_TASKS or, without tasks, the validation loss.

  If `golden` is given, compares its texts instead; returns 1 if any has moved.
  """
  mesh, run = config.mesh_layout, config.run
  mesh_layout.check_layout(
    mesh,
    config.model,
    run.batch_sizes.sizes[0],
    num_pods=config.pods.num_pods,
  )
  model = resolve_dtype(config.model, mesh)
  config = dataclasses.replace(config, model=model)
  if golden:
    return compare_golden(golden, model_dir, config, adapter, as_json=as_json)
  if not config.evaluation.eval_tasks:
    results = _compute_validation_loss(model_dir, config, adapter)
    print_results(results, as_json)
    return 0
  shapes = saved_shapes(model)
  check_room(model, run)
  checkpoints = find_checkpoints(
    model_dir, shapes, config.evaluation, run.train_steps
  )
  vocabulary = load_vocabulary(
    model_dir, config.data, vocab_size=model.vocab_size
  )
  # Import SeqIO and TensorFlow, which takes seconds, only after these checks.
  from palm_mtf.evaluation.evaluator import TaskEvaluation
  from palm_mtf.evaluation.seqio_tasks import open_eval_tasks
  from palm_mtf.rates.measure import warn_if_slow

  assertions = Assertions(model_dir, config, "evaluate")
  tasks = open_eval_tasks(config.evaluation, vocabulary, model.sequence_length)
  log_dtype(model, mesh)
  warn_if_slow(model, mesh)
  evaluation, printed = None, False
  # If EVAL_CHECKPOINTS = "every", an iteration may wait until training has
  # written the next checkpoint.
  for checkpoint in checkpoints:
    weights_to_load.check_same_model(checkpoint, shapes, vocabulary.sha256)
    if not printed:
      weights_to_load.warn_of_larger_share(checkpoint, config.data)
    adapted, checkpoint = add_adapter(adapter, config, checkpoint)
    if not evaluation:
      own = f"adapter_{checkpoint.blake2b}" if adapter else ""
      evaluation = TaskEvaluation(
        *(model_dir, adapted, vocabulary, tasks, assertions, own)
      )
    for outcome in evaluation.evaluate(checkpoint):
      _print_outcome(outcome, as_json, has_head=printed)
      printed = True
  return 0


def _compute_validation_loss(
  model_dir: str, config: Config, adapter: str | None
) -> dict[str, object]:
  """Returns validation loss (nats per token), perplexity and bits per byte."""
  if (beta := config.loss.preference_beta) is not None:
    raise UserError(
      f"PREFERENCE_BETA = {beta}: only training measures the validation loss "
      "of pairs (metrics.jsonl); set EVAL_TASKS, or use palm_mtf score."
    )
  checkpoint, vocabulary = open_newest(model_dir, config)
  config, checkpoint = add_adapter(adapter, config, checkpoint)
  if config.decode.knn_index and (
    config.model.has_prefix or config.model.adapter_length
  ):
    raise UserError(
      "KNN_INDEX: the validation loss with an index is measured only of causal "
      "models without virtual positions; use palm_mtf score."
    )
  model, mesh, run = config.model, config.mesh_layout, config.run
  log_dtype(model, mesh)
  # This process has the devices of only one pod. So split the batch of all pods
  # into microbatches of the size that training uses, which fit in memory.
  batch_size = run.batch_sizes.sizes[0]
  num_parts = config.pods.num_pods * mesh.num_microbatches
  corpus = corpus_of_run(model_dir, config, vocabulary)
  weights_to_load.warn_of_other_evaluation_text(checkpoint, corpus, config.data)
  batches = list(
    corpus.validation_batches(
      batch_size=batch_size, num_rows=run.num_validation_rows
    )
  )
  from palm_mtf.generation.inference.sessions import compute_mean_loss
  from palm_mtf.rates.measure import warn_if_slow

  warn_if_slow(model, mesh)
  parts = [x for batch in batches for x in split_batch(batch, num_parts)]
  loss = compute_mean_loss(checkpoint, model, mesh, parts, config.pods)
  results: dict[str, object] = {
    "checkpoint": checkpoint.path,
    "step": checkpoint.manifest.step,
    "activation_dtype": model.activation_dtype,
    "validation_loss": loss,
    "perplexity": math.exp(loss),
    "unigram_entropy": unigram_entropy(batches),
  }
  # Span corruption has no bits per byte: its sentinels stand for no bytes.
  if model.objective != "span_corruption":
    bits_per_token = loss / math.log(2)
    per_byte = bits_per_token / corpus.validation_bytes_per_token
    results["bits_per_byte"] = per_byte
  if config.decode.knn_index:
    loss = _compute_loss_with_index(checkpoint, config, batches)
    results |= {"knn_loss": loss, "knn_perplexity": math.exp(loss)}
  return results


def _compute_loss_with_index(
  checkpoint: manifest.Checkpoint, config: Config, batches: Sequence[Batch]
) -> float:
  """Returns the validation loss with KNN_INDEX, in nats per token."""
  from palm_mtf.generation.inference.scorer import Example, Scorer
  from palm_mtf.generation.inference.sessions import LoadedDecoder

  # A document in a row is predicted as if it were by itself.
  examples, weights = [], []
  for batch in batches:
    ones = np.ones_like(batch["inputs"])
    names = "inputs", "targets", "segments", "loss_weights"
    for inputs, targets, segments, each in zip(
      *(batch.get(x, ones) for x in names), strict=True
    ):
      for own in (segments == x for x in np.unique(segments)):
        examples.append(Example(inputs[own][:1].tolist(), targets[own]))
        weights.append(each[own])
  with LoadedDecoder.of_run(checkpoint, config) as loaded:
    found = dict(Scorer(loaded, adds_start=False).token_losses(examples))
  losses = [found[i] for i in range(len(found))]
  return float(
    np.average(np.concatenate(losses), weights=np.concatenate(weights))
  )


def _print_outcome(
  outcome: "TaskOutcome", as_json: bool, *, has_head: bool
) -> None:
  """Prints metrics; if `has_head` is false, prints the table's header first."""
  # Flush, because the next checkpoint may come only hours later.
  if as_json:
    print(json_text(dataclasses.asdict(outcome)), flush=True)
    return
  if not has_head:
    print(
      f"{'step':>8}  {'task':28}  {'split':12}  {'examples':>8}  "
      f"{'metric':24}  {'value':>10}"
    )
  for name, value in outcome.metrics.items():
    count = outcome.num_examples
    if name.removesuffix("_clean") in outcome.metrics.keys() - {name}:
      count = outcome.num_clean or count
    text = f"{value:10.4f}" if isinstance(value, float) else repr(value)
    print(
      f"{outcome.step:8}  {outcome.task:28}  {outcome.split:12}  "
      f"{count:8,}  {name:24}  {text}",
      flush=True,
    )


_POLL_SECS = 1.0


def find_checkpoints(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  config: TaskEvalConfig,
  train_steps: int,
) -> Iterator[manifest.Checkpoint]:
  """Returns an iterator over the checkpoints to evaluate.

  The run may still be training. If EVAL_CHECKPOINTS is "every", `train_steps`
  is the last step to wait for.

  Raises UserError if a checkpoint is missing, damaged or from another model.
  "newest" and "every" skip damaged checkpoints. For "every", the returned
  iterator waits for missing checkpoints, and raises the error itself.
  """
  if config.eval_checkpoints == NEWEST:
    return iter([weights_to_load.newest_checkpoint(model_dir, shapes)])
  if config.eval_checkpoints == EVERY:
    return _wait_for_each(model_dir, shapes, config.eval_wait_secs, train_steps)
  # Check all checkpoints now, because evaluating the first one takes long.
  folders = {
    step_of(path): path for path in manifest.checkpoint_folders(model_dir)
  }
  found = []
  for step in config.eval_checkpoints:
    if step not in folders:
      steps = ", ".join(map(str, folders)) or "none"
      raise UserError(
        f"EVAL_CHECKPOINTS: {model_dir!r} has no checkpoint of step {step}; "
        f"it has: {steps}."
      )
    try:
      found.append(manifest.read_and_hold(folders[step]))
    except manifest.DamagedCheckpointError as error:
      is_removed = isinstance(error, manifest.RemovedCheckpointError)
      why = "was just removed" if is_removed else f"is damaged: {error}"
      raise UserError(
        f"EVAL_CHECKPOINTS: {folders[step]} {why}; leave {step} out."
      ) from None
    weights_to_load.check_same_model(found[-1], shapes)
  return iter(found)


def _wait_for_each(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  wait_secs: float,
  train_steps: int,
) -> Iterator[manifest.Checkpoint]:
  done = -1  # step of the last checkpoint that was yielded or skipped
  waiting_since = time.monotonic()
  while done < train_steps:
    # The run may have added checkpoints. The list is sorted by step.
    new = [
      p for p in manifest.checkpoint_folders(model_dir) if step_of(p) > done
    ]
    if not new:
      if time.monotonic() - waiting_since > wait_secs:
        _logger.warning(
          f"no checkpoint after step {max(done, 0)} came within EVAL_WAIT_SECS "
          f"= {wait_secs:g}; the same command resumes"
        )
        return
      time.sleep(min(_POLL_SECS, wait_secs))
      continue
    done = step_of(new[0])
    try:
      checkpoint = manifest.read_and_hold(new[0])
    except manifest.RemovedCheckpointError:
      continue  # the run keeps only the newest KEEP_CHECKPOINTS
    except manifest.DamagedCheckpointError as error:
      manifest.warn_of_damage(new[0], error)
      continue
    weights_to_load.check_same_model(checkpoint, shapes)
    yield checkpoint
    # EVAL_WAIT_SECS does not include the time that the evaluation took.
    waiting_since = time.monotonic()


# Nats per token by which rounding may change log p, such as in another layout
# or version (docs/evaluation.md has measurements).
_TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
_MOST_LOG_P = 1e100  # so that sums are finite
_GOLDEN_FORM = 'write {"text": "..."}, or a line as this command records it'


def compare_golden(
  path: str, model_dir: str, config: Config, adapter: str | None, as_json: bool
) -> int:
  """Records or compares each line; returns 1 if a text moved, otherwise 0.

  Raises UserError if a line is wrong.
  """
  path = os.path.expanduser(path)
  lines, file = _read_golden(path), describe_file(path)
  checkpoint, vocabulary = open_newest(model_dir, config)
  config, checkpoint = add_adapter(adapter, config, checkpoint)
  dtype = config.model.activation_dtype
  log_dtype(config.model, config.mesh_layout)
  encoded = vocabulary.encode_batch([line["text"] for line in lines])
  texts = [[((), ids)] for ids in encoded]
  found = compute_log_likelihoods(checkpoint, config, vocabulary, texts)
  states: collections.Counter[str] = collections.Counter()
  for i, (ids, log_p) in enumerate(zip(encoded, found, strict=True)):
    now = {
      "log_p": log_p,  # nats, of the whole text
      "tolerance": _TOLERANCES[dtype] * len(ids),  # nats that log p may move
      "tokens": len(ids),
      "vocabulary_sha256": vocabulary.sha256,
      "activation_dtype": dtype,
    }
    is_new, moved = "log_p" not in lines[i], _find_move(lines[i], now)
    state = "moved" if moved else "recorded" if is_new else "same"
    states[state] += 1
    if as_json:
      record = {"number": i + 1, "state": state, **lines[i], "now": now}
      print(json_text(record))
    elif moved:
      print(f"text {i + 1} moved: {moved}: {short_json(lines[i]['text'])}")
    lines[i] |= now if state == "recorded" else {}
  if states["recorded"]:
    check_unchanged(file)  # the user, or another command, may have edited it
    write_json_lines(path, lines)
  if not as_json:
    print(", ".join(f"{count:,} {state}" for state, count in states.items()))
  return int(states["moved"] > 0)


def _read_golden(path: str) -> list[dict[str, Any]]:
  what, lines = f"--golden = {path!r}", []
  if not path.endswith(".jsonl"):  # the file is written, too, uncompressed
    raise UserError(f"{what}: give the name of a .jsonl file; {_GOLDEN_FORM}.")
  for _, where, line in read_json_lines(
    path, what, _GOLDEN_FORM, needed=_GOLDEN_FORM
  ):
    if not check_text(line.get("text"), f"{where}: 'text'", _GOLDEN_FORM):
      raise UserError(f"{where}: 'text' is empty; {_GOLDEN_FORM}.")
    for name in ("log_p", "tolerance", "tokens") if "log_p" in line else ():
      number = line.get(name)
      if type(number) not in (int, float) or not abs(number) < _MOST_LOG_P:
        raise UserError(
          f"{where}: {name!r} is {short_json(number)}, not a number below "
          f"{_MOST_LOG_P:g}; leave 'log_p' out to record the line again."
        )
    lines.append(line)
  return lines


def _find_move(line: Mapping[str, Any], now: Mapping[str, Any]) -> str:
  """Returns why the text of a line moved; "" if it did not, or is recorded."""
  if not math.isfinite(log_p := now["log_p"]):
    return f"log p is {log_p}"
  if "log_p" not in line:
    return ""
  other = ""
  if line.get("vocabulary_sha256") != now["vocabulary_sha256"]:
    other = ", with another vocabulary"
  if line["tokens"] != now["tokens"]:
    return f"{line['tokens']:,} tokens became {now['tokens']:,}{other}"
  tolerance = line["tolerance"]
  if line.get("activation_dtype") != now["activation_dtype"]:
    tolerance += now["tolerance"]
  if abs(log_p - line["log_p"]) <= tolerance:
    return ""
  became = f"log p {line['log_p']:.4f} became {log_p:.4f}{other}"
  return f"{became}, and may differ by {tolerance:.4g}"
