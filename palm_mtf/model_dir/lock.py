# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The training lock: one process at a time changes a MODEL_DIR.

The process locks MODEL_DIR/trainer.lock, and writes its id and host there, for
the messages of processes that find the lock taken.
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import writing
from palm_mtf.model_dir.paths import ModelDir

_logger = logging.getLogger(__name__)


@contextlib.contextmanager
def training_lock(model_dir: str) -> Iterator[None]:
  """Locks `model_dir` while the body runs.

  Raises UserError if another process holds the lock, or it cannot be written.
  """
  path = ModelDir(model_dir).lock
  is_new = not os.path.isdir(model_dir)
  descriptor = _lock(model_dir, path)
  # Lock the folder too, because a user may remove the lock file. On NFS, which
  # cannot lock folders, only the file is locked.
  folder = os.open(model_dir, os.O_RDONLY)
  try:
    _flock(folder, model_dir, path)
    yield
  finally:
    if _is_at(descriptor, path):
      os.unlink(path)
    os.close(descriptor)
    os.close(folder)
    if is_new:  # remove the folder if it is empty
      with contextlib.suppress(OSError):
        os.rmdir(model_dir)


def is_locked(model_dir: str) -> bool:
  """Returns whether a process holds the training lock; writes nothing."""
  try:
    with open(ModelDir(model_dir).lock) as file:
      fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
  except BlockingIOError:
    return True
  except OSError:  # no file, or no locks
    pass
  return False


def _lock(model_dir: str, path: str) -> int:
  """Locks the file at `path`; returns its descriptor."""
  # The kernel releases a flock(2) even if the process that holds it is killed.
  while True:
    with writing(model_dir, None):
      os.makedirs(model_dir, exist_ok=True)
      descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      refused = _flock(descriptor, model_dir, path)
    except UserError:
      os.close(descriptor)
      raise
    if refused:
      _logger.warning(
        f"{model_dir} is on a file system without locks ({refused}): make sure "
        "that only one process trains there"
      )
    # If the last holder has removed the file, try again, because a lock on a
    # removed file does not keep other processes out.
    if _is_at(descriptor, path):
      break
    os.close(descriptor)
  holder = {"pid": os.getpid(), "host": socket.gethostname()}
  with contextlib.suppress(OSError):  # a full disk; the lock works anyway
    os.ftruncate(descriptor, 0)
    os.write(descriptor, json_text(holder).encode())
  return descriptor


def _flock(descriptor: int, model_dir: str, path: str) -> str:
  """Locks an open file; returns "", or why the file system has no locks."""
  try:
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
      return error.strerror
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: {_holder(path)} trains there; wait for it, "
      "stop it, or choose another MODEL_DIR."
    ) from None
  return ""


def _is_at(descriptor: int, path: str) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))
  except FileNotFoundError:
    return False


def _holder(path: str) -> str:
  try:
    with open(path, encoding="utf-8") as file:
      content = json.load(file)
    return f"process {content['pid']} on {content['host']}"
  except (OSError, ValueError, RecursionError, KeyError, TypeError):
    return "another process"  # the holder has not written its id yet
