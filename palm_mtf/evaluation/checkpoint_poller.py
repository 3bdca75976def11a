# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the checkpoints that EVAL_CHECKPOINTS selects, or waits for them."""

import logging
import time
from collections.abc import Iterator, Mapping

from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  DamagedCheckpointError,
  RemovedCheckpointError,
  checkpoint_folders,
  read_and_hold,
  warn_of_damage,
)
from palm_mtf.checkpoints.same_model import check_same_model, newest_checkpoint
from palm_mtf.config.task_eval import EVERY, NEWEST, TaskEvalConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.paths import step_of

_logger = logging.getLogger(__name__)

_POLL_SECS = 1.0


def find_checkpoints(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  config: TaskEvalConfig,
  train_steps: int,
) -> Iterator[Checkpoint]:
  """Returns an iterator over the checkpoints to evaluate.

  Args:
    model_dir: MODEL_DIR of a run, which may still be training.
    shapes: {name: shape} of the model's parameters.
    config: settings; only eval_checkpoints and eval_wait_secs are read.
    train_steps: if EVAL_CHECKPOINTS is "every", the last step to wait for.

  Raises:
    UserError: if a checkpoint is missing, damaged or from another model.
      "newest" and "every" skip damaged checkpoints. For "every", the returned
      iterator waits for missing checkpoints, and raises the error itself.
  """
  if config.eval_checkpoints == NEWEST:
    return iter([newest_checkpoint(model_dir, shapes)])
  if config.eval_checkpoints == EVERY:
    return _wait_for_each(model_dir, shapes, config.eval_wait_secs, train_steps)
  # Check all checkpoints now, because evaluating the first one takes long.
  folders = {step_of(path): path for path in checkpoint_folders(model_dir)}
  found = []
  for step in config.eval_checkpoints:
    if step not in folders:
      steps = ", ".join(map(str, folders)) or "none"
      raise UserError(
        f"EVAL_CHECKPOINTS: {model_dir!r} has no checkpoint of step {step}; "
        f"it has: {steps}."
      )
    try:
      found.append(read_and_hold(folders[step]))
    except DamagedCheckpointError as error:
      is_removed = isinstance(error, RemovedCheckpointError)
      why = "was just removed" if is_removed else f"is damaged: {error}"
      raise UserError(
        f"EVAL_CHECKPOINTS: {folders[step]} {why}; leave {step} out."
      ) from None
    check_same_model(found[-1], shapes)
  return iter(found)


def _wait_for_each(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  wait_secs: float,
  train_steps: int,
) -> Iterator[Checkpoint]:
  done = -1  # step of the last checkpoint that was yielded or skipped
  waiting_since = time.monotonic()
  while done < train_steps:
    # The run may have added checkpoints. The list is sorted by step.
    new = [p for p in checkpoint_folders(model_dir) if step_of(p) > done]
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
      checkpoint = read_and_hold(new[0])
    except RemovedCheckpointError:  # removed by the run (KEEP_CHECKPOINTS)
      continue
    except DamagedCheckpointError as error:
      warn_of_damage(new[0], error)
      continue
    check_same_model(checkpoint, shapes)
    yield checkpoint
    waiting_since = time.monotonic()  # do not count the evaluation
