# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints stay, and the room that they need on the disk.

The last KEEP_CHECKPOINTS stay, and every KEEP_EVERY_STEPS-th. A damaged one is
set aside under another name, and never removed.
"""

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
  read_whole,
)
from palm_mtf.config.run import RunConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import writing
from palm_mtf.model_dir.layout import ModelDir, step_of

_logger = logging.getLogger(__name__)

# What a killed process may leave; nothing reads it.
_PARTIAL = ".partial_"


def expendable(
  paths: list[str], keep: int, keep_every_steps: int | None
) -> list[str]:
  """Returns which of `paths`, oldest first, are neither new nor kept for good.

  Args:
    paths: paths of checkpoints.
    keep: how many of the newest stay.
    keep_every_steps: those whose step is a multiple of it stay too.
  """
  return [
    path
    for path in paths[:-keep]
    if not keep_every_steps or step_of(path) % keep_every_steps
  ]


def remove_checkpoint(path: str) -> None:
  """Removes a checkpoint: it loses its name before it loses a file."""
  root, name = os.path.split(path)
  hidden = os.path.join(root, f"{_PARTIAL}{name}_removed")
  with writing(path, None):
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def set_damaged_aside(model_dir: str, newest: Checkpoint | None) -> None:
  """Renames the checkpoints that are newer than the newest whole one; says so.

  For the only trainer of `model_dir`, who is about to write those steps again.
  What a killed one left half written is removed.

  Args:
    model_dir: MODEL_DIR.
    newest: checkpoint that `newest_whole` found in it.
  """
  root = ModelDir(model_dir).checkpoints
  for name in os.listdir(root) if os.path.isdir(root) else []:
    if name.startswith(_PARTIAL):
      shutil.rmtree(os.path.join(root, name), ignore_errors=True)
  for path in checkpoint_folders(model_dir):
    if not newest or step_of(path) > newest.manifest.step:
      _set_aside(path)


def make_way(path: str) -> None:
  """Frees a checkpoint's name: only one that is whole is removed."""
  try:
    read_whole(path)
  except DamagedCheckpointError:
    _set_aside(path)
  else:
    remove_checkpoint(path)


def _set_aside(path: str) -> None:
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
  """Raises UserError unless the disk takes the checkpoints of a run.

  These are those kept and, while the newest is written, one more; those that
  are there already have their room.
  """
  existing = os.path.abspath(model_dir)
  while not os.path.exists(existing):
    existing = os.path.dirname(existing)
  wanted = run.keep_checkpoints + 1
  if run.keep_every_steps:
    wanted += run.train_steps // run.keep_every_steps
  # No more than are written, the last step's included.
  wanted = min(wanted, run.train_steps // run.checkpoint_steps + 1)
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
