# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes files and folders whole or not at all, and says when the disk cannot.

What is written gets a temporary name beside its own and is renamed when it is
complete, so that a reader never meets half of it, however the writer ends.
"""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator

from palm_mtf.errors import UserError

_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_model_dir(model_dir: object) -> None:
  """Raises UserError unless `model_dir` is, or may become, a folder."""
  if not isinstance(model_dir, str) or not model_dir:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: give the path of a folder, such as "
      "'\"runs/first\"'."
    )
  if model_dir.startswith("~"):
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: give the whole path, such as "
      f"{os.path.expanduser(model_dir)!r}; a folder of this name is not meant."
    )
  if os.path.exists(model_dir) and not os.path.isdir(model_dir):
    raise UserError(f"MODEL_DIR = {model_dir!r}: is a file; give a folder.")


def write_atomically(path: str, content: bytes) -> None:
  """Writes a file, and the folders above it.

  Raises:
    UserError: the disk is full, or the path may not be written.
  """
  folder = os.path.dirname(os.path.abspath(path))
  with writing(folder, len(content)):
    os.makedirs(folder, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".partial_")
    try:
      with os.fdopen(descriptor, "wb") as file:
        file.write(content)
      os.chmod(temporary, 0o666 & ~_umask())  # mkstemp's is 0o600
      os.replace(temporary, path)
    except BaseException:
      os.unlink(temporary)
      raise


@contextlib.contextmanager
def new_folder(path: str, needed_bytes: int) -> Iterator[str]:
  """Gives a temporary folder to fill, which becomes `path` at the end.

  Where `path` has been made meanwhile by another process, that one stays.

  Args:
    path: the folder to make; those above it are made too.
    needed_bytes: what it will hold at most, for the message of a full disk.

  Raises:
    UserError: the disk is full, or the path may not be written.
  """
  parent, name = os.path.split(path)
  with writing(path, needed_bytes):
    os.makedirs(parent, exist_ok=True)
    temporary = tempfile.mkdtemp(dir=parent, prefix=f".partial_{name}_")
    try:
      yield temporary
      os.chmod(temporary, 0o777 & ~_umask())
      try:
        os.rename(temporary, path)
      except OSError as error:
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
          raise
    finally:
      shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def writing(path: str, needed_bytes: int | None) -> Iterator[None]:
  """Turns the operating system's refusals to write `path` into UserErrors.

  Args:
    path: what is written.
    needed_bytes: its size at most, if that is known, for the message.
  """
  try:
    yield
  except OSError as error:
    if error.errno in _NO_SPACE:
      needed = ""
      if needed_bytes:
        needed = f", which needs up to {needed_bytes:,} bytes"
      raise UserError(
        f"no disk space left for {path}{needed}; free some, or choose another "
        "folder."
      ) from None
    raise UserError(
      f"cannot write {path}: {error.strerror}; choose another folder."
    ) from None


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask
