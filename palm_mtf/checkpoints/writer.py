# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints are written by a thread while training goes on.

A checkpoint is whole or not there: it gets its name when all of it is on the
disk, and only then are older ones removed.
"""

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Iterator

from palm_mtf.accounting.optimizer_state import checkpoint_bytes
from palm_mtf.checkpoints.manifest import (
  WEIGHTS,
  Checkpoint,
  Manifest,
  WriteWeights,
  checkpoint_folders,
  read_checkpoint,
  write_manifest,
)
from palm_mtf.checkpoints.retention import (
  free_path,
  removable,
  remove_or_warn,
  remove_partial,
)
from palm_mtf.config import RunConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import new_folder
from palm_mtf.model_dir.layout import ModelDir


class BackgroundWriter:
  """Writes the checkpoints of a run, one at a time.

  A context manager, which waits for the last one, also after an error.
  """

  def __init__(self, model_dir: str, run: RunConfig, newest: Checkpoint | None):
    """Continues after `newest`, the checkpoint that the run resumes from."""
    self._model_dir, self._run = model_dir, run
    self._newest = newest
    self._step = newest.manifest.step if newest else 0
    self._thread: threading.Thread | None = None
    # Raised in the thread, and again where the training loop next asks.
    self._error: BaseException | None = None
    self._wait_secs = 0.0

  def __enter__(self) -> "BackgroundWriter":
    return self

  def __exit__(self, kind: type | None, *unused: object) -> None:
    # Whoever interrupts a run a second time does not wait for a checkpoint.
    if kind is None or issubclass(kind, Exception):
      self._join()

  @property
  def step(self) -> int:
    """Step of the newest checkpoint, written or being written."""
    return self._step

  @property
  def newest_path(self) -> str:
    """Path of the newest checkpoint that is written, for messages."""
    return self._newest.path if self._newest else "none yet"

  def write(
    self, manifest: Manifest, copy_weights: Callable[[], WriteWeights]
  ) -> None:
    """Copies the weights, then writes a checkpoint in the background.

    Args:
      manifest: manifest of the checkpoint, but for `parent`.
      copy_weights: copies the weights; returns a function that writes the copy.

    Raises:
      UserError: the checkpoint before could not be written.
    """
    with self._pausing():
      self.wait()  # for the one before: host memory has one copy at a time
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
      newest = self._newest.path if self._newest else "none"
      error, self._error = self._error, None
      if not isinstance(error, UserError):
        raise error
      raise UserError(f"{error} The newest checkpoint is {newest}.")

  def wait(self) -> Checkpoint | None:
    """Waits for the checkpoint that is being written; returns the newest.

    Raises:
      UserError: the checkpoint could not be written.
    """
    with self._pausing():
      self._join()
    self.check()
    return self._newest

  def take_wait_secs(self) -> float:
    """Returns the seconds that training waited since the last call."""
    secs, self._wait_secs = self._wait_secs, 0.0
    return secs

  @contextlib.contextmanager
  def _pausing(self) -> Iterator[None]:
    before, start = self._wait_secs, time.perf_counter()
    try:
      yield
    finally:  # replaces what a nested call has added
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
  """Writes a checkpoint, then removes those that retention does not keep.

  Args:
    model_dir: MODEL_DIR.
    manifest: manifest of the checkpoint.
    write_weights: writes the weights under a prefix.
    keep: number of newest checkpoints that stay.
    keep_every_steps: steps between checkpoints that stay for good.

  Raises:
    UserError: the disk is full, or MODEL_DIR cannot be written.
  """
  path = ModelDir(model_dir).checkpoint(manifest.step)
  # The folder has a temporary name until the body has ended.
  # Another run of this MODEL_DIR may have got as far.
  needed = checkpoint_bytes(manifest.shapes)
  with new_folder(path, needed, make_way=free_path) as folder:
    seals = write_weights(os.path.join(folder, WEIGHTS))
    write_manifest(folder, manifest, seals)
  # Nothing is removed before what replaces it is read: its weights were hashed
  # as the files had them.
  written = dataclasses.replace(read_checkpoint(path), is_verified=True)
  remove_partial(model_dir)
  for old in removable(checkpoint_folders(model_dir), keep, keep_every_steps):
    remove_or_warn(old)
  return written
