# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints EVAL_CHECKPOINTS names, as they come to be there."""

import logging
import os
import time
from collections.abc import Iterator, Mapping

from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  DamagedCheckpointError,
  check_same_model,
  checkpoint_folders,
  newest_checkpoint,
  read_whole,
  warn_of_damage,
)
from palm_mtf.config.evaluation import EVERY, NEWEST, TaskEvalConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.layout import step_of

_logger = logging.getLogger(__name__)

_POLL_SECS = 1.0


def checkpoints_to_evaluate(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  config: TaskEvalConfig,
  train_steps: int,
) -> Iterator[Checkpoint]:
  """Yields the checkpoints to evaluate, each once.

  Args:
    model_dir: MODEL_DIR of a run, which may still train.
    shapes: the model's shapes.
    config: eval_checkpoints and eval_wait_secs are read.
    train_steps: "every" ends with the checkpoint of this step.

  Raises:
    UserError: there is none, or not the one asked for, or one is damaged or of
      another model; before the first is yielded, but for "every".
  """
  if config.eval_checkpoints == NEWEST:
    return iter([newest_checkpoint(model_dir, shapes)])
  if config.eval_checkpoints == EVERY:
    return _every(model_dir, shapes, config.eval_wait_secs, train_steps)
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
      found.append(read_whole(folders[step]))
    except DamagedCheckpointError as error:
      raise UserError(
        f"EVAL_CHECKPOINTS: {folders[step]} is damaged: {error}; leave "
        f"{step} out."
      ) from None
    check_same_model(found[-1], shapes)
  return iter(found)


def _every(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  wait_secs: float,
  train_steps: int,
) -> Iterator[Checkpoint]:
  done = -1
  waiting_since = time.monotonic()
  while done < train_steps:
    new = [p for p in checkpoint_folders(model_dir) if step_of(p) > done]
    if not new:
      if time.monotonic() - waiting_since > wait_secs:
        _logger.warning(
          f"no checkpoint after step {max(done, 0)} came within EVAL_WAIT_SECS "
          f"= {wait_secs:g}; the same command goes on"
        )
        return
      time.sleep(min(_POLL_SECS, wait_secs))
      continue
    done = step_of(new[0])
    try:
      checkpoint = read_whole(new[0])
    except DamagedCheckpointError as error:
      if os.path.isdir(new[0]):  # or else KEEP_CHECKPOINTS has removed it
        warn_of_damage(new[0], error)
      continue
    check_same_model(checkpoint, shapes)
    yield checkpoint
    waiting_since = time.monotonic()
