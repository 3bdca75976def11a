# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Retention of checkpoints: which are removed, and the disk space of the rest.

The last KEEP_CHECKPOINTS stay, and every KEEP_EVERY_STEPS-th.
"""

import errno
import logging
import os
import shutil
from collections.abc import Mapping

from palm_mtf.accounting.optimizer_state import (
  LARGEST_STATE,
  OptimizerState,
  checkpoint_bytes,
)
from palm_mtf.checkpoints.manifest import (
  Checkpoint,
  DamagedCheckpointError,
  checkpoint_folders,
  find_checkpoints,
  read_whole,
)
from palm_mtf.config import RunConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import PARTIAL, writing
from palm_mtf.model_dir.layout import ModelDir, step_of

_logger = logging.getLogger(__name__)


def removable(
  paths: list[str], keep: int, keep_every_steps: int | None
) -> list[str]:
  """Returns the checkpoints that retention does not keep.

  Args:
    paths: paths of checkpoints, oldest first.
    keep: number of newest checkpoints that stay.
    keep_every_steps: steps between checkpoints that stay for good.
  """
  return [
    path
    for path in paths[:-keep]
    if not keep_every_steps or step_of(path) % keep_every_steps
  ]


def remove_checkpoint(path: str) -> None:
  """Removes a checkpoint; raises UserError where the disk refuses."""
  # Renamed first: no reader, and no process after a kill, meets half of it.
  hidden = _hidden(path)
  try:
    if not os.access(path, os.W_OK):  # so its owner protects it
      raise PermissionError(errno.EACCES, "it is write-protected")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
  except OSError as error:
    left = "" if os.path.lexists(path) else f", of which {hidden} is left"
    raise UserError(
      f"cannot remove {path}{left}: {error.strerror}; remove it yourself."
    ) from None


def remove_or_warn(path: str) -> None:
  """Removes a checkpoint of a run that goes on also where this fails."""
  try:
    remove_checkpoint(path)
  except UserError as error:
    _logger.warning(str(error))


def remove_later(model_dir: str, step: int) -> None:
  """Removes the checkpoints after a step that training has gone back to."""
  # The newest first: if the process is killed here, the next one resumes from
  # the newest that is left, and detects the same spike again.
  for late in reversed(find_checkpoints(model_dir)):
    if late.manifest.step > step:
      remove_or_warn(late.path)


def quarantine_damaged(model_dir: str, newest: Checkpoint | None) -> None:
  """Renames the damaged checkpoints whose steps will be written again.

  Args:
    model_dir: MODEL_DIR, held by the training lock.
    newest: newest whole checkpoint in it.
  """
  remove_partial(model_dir)
  # All that are newer than the newest whole one are damaged. Older ones are in
  # nobody's way.
  for path in checkpoint_folders(model_dir):
    if not newest or step_of(path) > newest.manifest.step:
      _quarantine(path)


def remove_partial(model_dir: str) -> None:
  """Removes what is left of checkpoints that were being written or removed."""
  root = ModelDir(model_dir).checkpoints
  for name in os.listdir(root) if os.path.isdir(root) else []:
    if name.startswith(PARTIAL):
      shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def free_path(path: str) -> None:
  """Renames the checkpoint at `path` for `remove_partial`, a damaged aside."""
  try:
    read_whole(path)
  except DamagedCheckpointError:
    _quarantine(path)
  else:
    os.rename(path, _hidden(path))


def _hidden(path: str) -> str:
  """Returns a free name for what is left of a checkpoint to be removed."""
  root, name = os.path.split(path)
  hidden = os.path.join(root, f"{PARTIAL}{name}_removed")
  shutil.rmtree(hidden, ignore_errors=True)
  return hidden


def _quarantine(path: str) -> None:
  # Kept for whoever wants to save some of it: nothing removes it.
  number, aside = 1, f"{path}.damaged"
  while os.path.lexists(aside):
    number += 1
    aside = f"{path}.damaged_{number}"
  with writing(path, None):
    os.rename(path, aside)
  _logger.warning(f"the damaged checkpoint is kept as {aside}")


def check_space(
  model_dir: str,
  shapes: Mapping[str, tuple[int, ...]],
  run: RunConfig,
  state: OptimizerState = LARGEST_STATE,
) -> None:
  """Raises UserError unless the disk has space for the checkpoints of a run.

  Args:
    model_dir: MODEL_DIR, which need not exist.
    shapes: shape of every parameter, by name.
    run: checkpoint settings.
    state: optimizer slots of each parameter.
  """
  # Checkpoints may be a link to another disk.
  existing = os.path.realpath(ModelDir(model_dir).checkpoints)
  while not os.path.exists(existing):
    existing = os.path.dirname(existing)
  # The newest is written before the oldest is removed: one more than are kept.
  wanted = run.keep_checkpoints + 1
  if run.keep_every_steps:
    wanted += run.train_steps // run.keep_every_steps
  # No more than are written, the last step's included.
  wanted = min(wanted, run.train_steps // run.checkpoint_steps + 1)
  # Those that are there already have their space.
  count = max(1, wanted - len(checkpoint_folders(model_dir)))
  needed = count * checkpoint_bytes(shapes, state)
  free = shutil.disk_usage(existing).free
  if free < needed:
    every = ""
    if run.keep_every_steps:
      every = f" and KEEP_EVERY_STEPS = {run.keep_every_steps}"
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: KEEP_CHECKPOINTS = {run.keep_checkpoints}"
      f"{every} needs room for {count} more, {needed:,} bytes, and its disk "
      f"has {free:,} free; free some, keep fewer, or choose another MODEL_DIR."
    )
