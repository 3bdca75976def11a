# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints in a thread while training continues; removes old ones.

A checkpoint gets its final name only when it is complete on the disk. Older
checkpoints are removed after that, except the last KEEP_CHECKPOINTS and those
at multiples of KEEP_EVERY_STEPS.
"""

import contextlib
import dataclasses
import errno
import logging
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from palm_mtf.accounting.optimizer_state import checkpoint_bytes, num_own
from palm_mtf.checkpoints.manifest import (
  WEIGHTS,
  Checkpoint,
  DamagedCheckpointError,
  Manifest,
  WriteWeights,
  checkpoint_folders,
  find_checkpoints,
  read_checkpoint,
  read_whole,
  write_manifest,
)
from palm_mtf.config import OptimizerConfig, RunConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import PARTIAL, new_path, writing
from palm_mtf.model_dir.paths import ModelDir, step_of

_logger = logging.getLogger(__name__)


class BackgroundWriter(contextlib.AbstractContextManager):
  """Writes the checkpoints of a run in a thread, one at a time.

  At its end, this context manager waits for the checkpoint that is being
  written, even if the body raises an exception.
  """

  def __init__(self, model_dir: str, run: RunConfig, newest: Checkpoint | None):
    """`newest` is the checkpoint to resume from; None for a new run."""
    self._model_dir, self._run = model_dir, run
    self._newest = newest
    # Step of the newest checkpoint, written or being written; 0 if none.
    self.step = newest.manifest.step if newest else 0
    self._thread: threading.Thread | None = None
    # The error that the thread raised; the main thread raises it in `check`.
    self._error: BaseException | None = None
    self._wait_secs = 0.0

  def __exit__(self, kind: type | None, *unused: object) -> None:
    # After KeyboardInterrupt, from the user's second Ctrl-C, do not wait.
    if kind is None or issubclass(kind, Exception):
      self._join()

  @property
  def newest_path(self) -> str:
    """Path of the newest checkpoint that was written, or "none yet"."""
    return self._newest.path if self._newest else "none yet"

  def write(
    self, manifest: Manifest, copy_weights: Callable[[], WriteWeights]
  ) -> None:
    """Copies the weights, then writes a checkpoint in the background.

    Args:
      manifest: its `parent` becomes the run's last checkpoint, if there is one.
      copy_weights: copies the weights; returns a function that writes the copy.

    Raises:
      UserError: the previous checkpoint could not be written.
    """
    with self._timing_wait():
      self.wait()  # so that host memory holds one copy at a time
      write_weights = copy_weights()
    if self._newest:
      parent = self._newest.as_parent
      manifest = dataclasses.replace(manifest, parent=parent)
    self.step = manifest.step
    self._thread = threading.Thread(
      target=self._write, args=(manifest, write_weights), daemon=True
    )
    self._thread.start()

  def check(self) -> None:
    """Raises, in the caller's thread, the last write's error, if any."""
    if self._error is not None:
      newest = self._newest.path if self._newest else "none"
      error, self._error = self._error, None
      if not isinstance(error, UserError):
        raise error
      raise UserError(f"{error} The newest checkpoint is {newest}.")

  def wait(self) -> Checkpoint | None:
    """Waits for the current write; returns the newest checkpoint, or None.

    Raises UserError if the last checkpoint could not be written.
    """
    with self._timing_wait():
      self._join()
    self.check()
    return self._newest

  def take_wait_secs(self) -> float:
    """Returns the seconds that training has waited since the previous call.

    Metrics report them. Training waits for copies of weights, and for writes.
    """
    secs, self._wait_secs = self._wait_secs, 0.0
    return secs

  @contextlib.contextmanager
  def _timing_wait(self) -> Iterator[None]:
    before, start = self._wait_secs, time.perf_counter()
    try:
      yield
    finally:
      # Replace the seconds that nested calls added: this time includes them.
      self._wait_secs = before + time.perf_counter() - start

  def _join(self) -> None:
    if self._thread:
      self._thread.join()
      self._thread = None

  def _write(self, manifest: Manifest, write_weights: WriteWeights) -> None:
    try:
      self._newest = write_checkpoint(
        self._model_dir,
        manifest,
        write_weights,
        keep=self._run.keep_checkpoints,
        keep_every_steps=self._run.keep_every_steps,
      )
    except BaseException as error:
      self._error = error


def write_checkpoint(
  model_dir: str,
  manifest: Manifest,
  write_weights: WriteWeights,
  *,
  keep: int,
  keep_every_steps: int | None = None,
) -> Checkpoint:
  """Writes a checkpoint, then removes old checkpoints that need not be kept.

  Keeps the last `keep`, and those whose step is a multiple of KEEP_EVERY_STEPS.

  Raises UserError if the disk is full, or MODEL_DIR cannot be written.
  """
  path = ModelDir(model_dir).checkpoint(manifest.step)
  own = num_own(manifest.settings)
  needed = checkpoint_bytes(manifest.shapes, num_own=own)
  # If an earlier process left a checkpoint of this step, rename it first.
  with new_path(path, needed, make_way=_free_path) as folder:
    os.mkdir(folder)
    seals = write_weights(os.path.join(folder, WEIGHTS))
    write_manifest(folder, manifest, seals)
  # Remove older checkpoints only once the new one could be read. It needs no
  # verification, because its hashes were just computed from its files.
  written = dataclasses.replace(read_checkpoint(path), is_verified=True)
  _remove_partial(model_dir)
  for old in removable(checkpoint_folders(model_dir), keep, keep_every_steps):
    remove_or_warn(old)
  return written


def removable(
  paths: list[str], keep: int, keep_every_steps: int | None
) -> list[str]:
  """Returns the paths of the checkpoints to remove, to save space on the disk.

  Keeps the last `keep`, and those whose step is a multiple of
  `keep_every_steps`. `paths` is sorted, oldest first.
  """
  return [
    path
    for path in paths[:-keep]
    if not keep_every_steps or step_of(path) % keep_every_steps
  ]


def remove_checkpoint(path: str) -> None:
  """Removes a checkpoint; raises UserError if it cannot be removed."""
  # Rename the folder first, so that no reader takes a half-deleted folder for a
  # checkpoint, even if this process is killed midway.
  hidden = _hidden(path)
  try:
    if not os.access(path, os.W_OK):  # rename would ignore this protection
      raise PermissionError(errno.EACCES, "it is write-protected")
    os.rename(path, hidden)
    shutil.rmtree(hidden)
  except OSError as error:
    left = "" if os.path.lexists(path) else f", of which {hidden} is left"
    raise UserError(
      f"cannot remove {path}{left}: {error.strerror}; remove it yourself."
    ) from None


def remove_or_warn(path: str) -> None:
  """Removes a checkpoint; only warns on failure, as training can continue."""
  try:
    remove_checkpoint(path)
  except UserError as error:
    _logger.warning(str(error))


def remove_later(model_dir: str, step: int) -> None:
  """Removes the checkpoints of steps that training repeats, after `step`."""
  # Remove the newest first. If this process is killed before all are removed,
  # the next process resumes from the newest checkpoint that is left, and
  # detects the same loss spike.
  for late in reversed(find_checkpoints(model_dir)):
    if late.manifest.step > step:
      remove_or_warn(late.path)


def quarantine_damaged(model_dir: str, newest: Checkpoint | None) -> None:
  """Renames damaged checkpoints, so that the run can save their steps again.

  The caller must hold the training lock of MODEL_DIR. `newest` is the newest
  whole checkpoint there, or None.
  """
  _remove_partial(model_dir)
  # Every checkpoint after the newest whole one is damaged. Older damaged ones
  # keep their names, because their steps are not written again.
  for path in checkpoint_folders(model_dir):
    if not newest or step_of(path) > newest.manifest.step:
      _quarantine(path)


def _remove_partial(model_dir: str) -> None:
  """Removes checkpoints whose writing or removal was interrupted."""
  root = ModelDir(model_dir).checkpoints
  for name in os.listdir(root) if os.path.isdir(root) else []:
    if name.startswith(PARTIAL):
      shutil.rmtree(os.path.join(root, name), ignore_errors=True)


def _free_path(path: str) -> None:
  """Renames the checkpoint at `path`, so that a new one can be written there.

  A damaged checkpoint is kept under its new name; a whole checkpoint is removed
  later, by `_remove_partial`.
  """
  try:
    read_whole(path)
  except DamagedCheckpointError:
    _quarantine(path)
  else:
    os.rename(path, _hidden(path))


def _hidden(path: str) -> str:
  """Returns the path to which a checkpoint is renamed before its removal."""
  root, name = os.path.split(path)
  hidden = os.path.join(root, f"{PARTIAL}{name}_removed")
  shutil.rmtree(hidden, ignore_errors=True)
  return hidden


def _quarantine(path: str) -> None:
  # Only `palm_mtf checkpoints prune` removes a renamed checkpoint, because the
  # user may want to recover a part of it.
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
  optimizer: OptimizerConfig | None = None,
  num_own: int = 0,
) -> None:
  """Raises UserError unless the disk has space for the checkpoints of a run.

  MODEL_DIR need not exist. If `optimizer` is None, any optimizer fits.
  `num_own` is the number of pods with own parameters.
  """
  # The folder of checkpoints may be a link to another disk.
  existing = os.path.realpath(ModelDir(model_dir).checkpoints)
  while not os.path.exists(existing):
    existing = os.path.dirname(existing)
  # Count one more, because the newest is written before the oldest is removed.
  wanted = run.keep_checkpoints + 1
  if run.keep_every_steps:
    wanted += run.train_steps // run.keep_every_steps
  # A run writes a checkpoint per CHECKPOINT_STEPS at most, and one at the end.
  wanted = min(wanted, run.train_steps // run.checkpoint_steps + 1)
  # Checkpoints that already exist need no more space.
  count = max(1, wanted - len(checkpoint_folders(model_dir)))
  needed = count * checkpoint_bytes(shapes, optimizer, run.frozen, num_own)
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
