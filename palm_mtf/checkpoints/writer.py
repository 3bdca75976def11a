# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes checkpoints whole or not at all, while training goes on.

The training loop hands over a copy of the weights and runs the next step; a
thread writes and hashes the files meanwhile, one checkpoint at a time. Only
when all of a checkpoint is on the disk does it get its name, and only then are
older ones removed (retention.py). What is damaged is never written over.
"""

import contextlib
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Iterator

from palm_mtf.accounting.optimizer_state import checkpoint_bytes
from palm_mtf.checkpoints.manifest import (
  MANIFEST,
  WEIGHTS,
  Checkpoint,
  Manifest,
  checkpoint_folders,
  describe_files,
  read_checkpoint,
  sealed_content,
)
from palm_mtf.checkpoints.retention import (
  expendable,
  make_way,
  remove_checkpoint,
)
from palm_mtf.config.run import RunConfig
from palm_mtf.errors import UserError
from palm_mtf.model_dir.atomic_files import new_folder
from palm_mtf.model_dir.layout import ModelDir

WriteWeights = Callable[[str], None]


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
  path = ModelDir(model_dir).checkpoint(manifest.step)
  if os.path.lexists(path):
    make_way(path)
  with new_folder(path, checkpoint_bytes(manifest.shapes)) as folder:
    write_weights(os.path.join(folder, WEIGHTS))
    content = sealed_content(manifest, describe_files(folder))
    with open(os.path.join(folder, MANIFEST), "w", encoding="utf-8") as file:
      json.dump(content, file, indent=1)
    for name in os.listdir(folder):
      _sync(os.path.join(folder, name))
  _sync(os.path.dirname(path))
  for old in expendable(checkpoint_folders(model_dir), keep, keep_every_steps):
    remove_checkpoint(old)
  return read_checkpoint(path)


def _sync(path: str) -> None:
  """Waits until a file or folder is on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
