# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints whole or not at all, while training goes on.

The training loop hands over a copy of the weights and runs the next step; a
thread writes and hashes the files meanwhile, one checkpoint at a time. Only
when all of a checkpoint is on the disk does it get its name, and only then are
older ones removed: the last KEEP_CHECKPOINTS stay, and every
KEEP_EVERY_STEPS-th. What is damaged is never written over.
"""

import contextlib
import dataclasses
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from palm_mtf.accounting.slots import (
  LARGEST_STATE,
  OptimizerState,
  checkpoint_bytes,
)
from palm_mtf.checkpoints import (
  MANIFEST,
  WEIGHTS,
  Checkpoint,
  DamagedCheckpointError,
  Manifest,
  checkpoint_folders,
  describe_files,
  read_checkpoint,
  read_whole,
  sealed_content,
)
from palm_mtf.config import RunConfig
from palm_mtf.console import say
from palm_mtf.disk import new_folder, writing
from palm_mtf.errors import UserError

WriteWeights = Callable[[str], None]
# What a killed process may leave; nothing reads it.
_PARTIAL = ".partial_"


class BackgroundWriter:
  """Writes the checkpoints of a run in a thread, one at a time.

  Used as a context manager, it waits at the end for the checkpoint that is
  being written, unless an interrupt ends the run at once.
  """

  def __init__(self, model_dir: str, run: RunConfig, newest: Checkpoint | None):
    """Writes into `model_dir`; `newest` is the checkpoint that is resumed."""
    self._model_dir, self._run = model_dir, run
    self._newest = newest
    self._step = newest.manifest.step if newest else 0
    self._thread: threading.Thread | None = None
    self._error: BaseException | None = None
    self._wait_secs = 0.0

  def __enter__(self) -> "BackgroundWriter":
    return self

  def __exit__(self, kind: type | None, *unused: object) -> None:
    if kind is None or issubclass(kind, Exception):
      self._join()

  @property
  def newest(self) -> Checkpoint | None:
    """The newest checkpoint that is written."""
    return self._newest

  @property
  def step(self) -> int:
    """The step of the newest checkpoint, written or being written."""
    return self._step

  @property
  def newest_path(self) -> str:
    """Where the newest checkpoint is that is written, for messages."""
    return self._newest.path if self._newest else "none yet"

  def write(
    self, manifest: Manifest, copy_weights: Callable[[], WriteWeights]
  ) -> None:
    """Copies the weights, then writes a checkpoint in the background.

    Waits first for the one before, so that there is one copy at a time.

    Args:
      manifest: what the checkpoint holds; its parent is the one before.
      copy_weights: copies the weights and returns what writes the copy under
        the path prefix that it is given.

    Raises:
      UserError: the one before could not be written.
    """
    with self._pausing():
      self.wait()
      write_weights = copy_weights()
    if self._newest:
      parent = self._newest.as_parent
      manifest = dataclasses.replace(manifest, parent=parent)
    self._step = manifest.step
    self._thread = threading.Thread(
      target=self._write, args=(manifest, write_weights), daemon=True
    )
    self._thread.start()

  def check(self) -> None:
    """Raises UserError if a checkpoint could not be written."""
    if self._error is not None:
      newest = self.newest.path if self.newest else "none"
      error, self._error = self._error, None
      if not isinstance(error, UserError):
        raise error
      raise UserError(f"{error} The newest checkpoint is {newest}.")

  def wait(self) -> Checkpoint | None:
    """Waits for the checkpoint that is being written; returns the newest.

    Raises:
      UserError: it could not be written.
    """
    with self._pausing():
      self._join()
    self.check()
    return self._newest

  def take_wait_secs(self) -> float:
    """Returns how long the caller has waited, in all, and starts anew."""
    secs, self._wait_secs = self._wait_secs, 0.0
    return secs

  @contextlib.contextmanager
  def _pausing(self) -> Iterator[None]:
    before, start = self._wait_secs, time.perf_counter()
    try:
      yield
    finally:  # what is nested counts once
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
    except BaseException as error:  # raised again in the caller's thread
      self._error = error


def write_checkpoint(
  model_dir: str,
  manifest: Manifest,
  write_weights: WriteWeights,
  *,
  keep: int,
  keep_every_steps: int | None = None,
) -> Checkpoint:
  """Writes a checkpoint whole or not at all, then removes the oldest.

  Args:
    model_dir: MODEL_DIR.
    manifest: what it holds.
    write_weights: writes the tensors under the path prefix it is given.
    keep: how many of the newest stay.
    keep_every_steps: those whose step is a multiple of it stay too.

  Raises:
    UserError: the disk is full, or MODEL_DIR cannot be written.
  """
  root = os.path.join(model_dir, "checkpoints")
  path = os.path.join(root, f"step_{manifest.step:08d}")
  if os.path.lexists(path):
    _make_way(path)
  with new_folder(path, checkpoint_bytes(manifest.shapes)) as folder:
    write_weights(os.path.join(folder, WEIGHTS))
    content = sealed_content(manifest, describe_files(folder))
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
      json.dump(content, file, indent=1)
    for name in os.listdir(folder):
      _sync(os.path.join(folder, name))
  _sync(root)
  for old in expendable(checkpoint_folders(model_dir), keep, keep_every_steps):
    remove_checkpoint(old)
  return read_checkpoint(path)


def expendable(
  paths: list[str], keep: int, keep_every_steps: int | None
) -> list[str]:
  """Returns which of `paths`, oldest first, are neither new nor kept for good.

  Args:
    paths: of checkpoints.
    keep: how many of the newest stay.
    keep_every_steps: those whose step is a multiple of it stay too.
  """
  return [
    path
    for path in paths[:-keep]
    if not keep_every_steps
    or int(os.path.basename(path).removeprefix("step_")) % keep_every_steps
  ]


def remove_checkpoint(path: str) -> None:
  """Removes a checkpoint: it loses its name before it loses a file."""
  root, name = os.path.split(path)
  hidden = os.path.join(root, f"{_PARTIAL}{name}_removed")
  with writing(path, None):
    shutil.rmtree(hidden, ignore_errors=True)
    os.rename(path, hidden)
    shutil.rmtree(hidden)


def set_damaged_aside(model_dir: str) -> None:
  """Renames what is newer than the newest whole checkpoint; says so.

  For the only trainer of `model_dir`, who is about to write those steps again.
  What a killed one left half written is removed.
  """
  root = os.path.join(model_dir, "checkpoints")
  for name in os.listdir(root) if os.path.isdir(root) else []:
    if name.startswith(_PARTIAL):
      shutil.rmtree(os.path.join(root, name), ignore_errors=True)
  for path in reversed(checkpoint_folders(model_dir)):
    try:
      read_whole(path)
    except DamagedCheckpointError:
      _set_aside(path)
    else:
      return


def _make_way(path: str) -> None:
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
  say(f"the damaged checkpoint is kept as {aside}")


def _sync(path: str) -> None:
  """Waits until a file or folder is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


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
