# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files and folders that are written atomically; the disk's errors by name."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator

from palm_mtf.errors import UserError

# Full disk, exceeded quota, exceeded size of a file.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def check_model_dir(model_dir: object) -> None:
  """Raises UserError unless `model_dir` is a folder, or may become one."""
  if not isinstance(model_dir, str) or not model_dir:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: give the path of a folder, such as "
      "'\"runs/first\"'."
    )
  # Shells expand "~"; gin does not, and would make a folder of that name.
  if model_dir.startswith("~"):
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: give the whole path, such as "
      f"{os.path.expanduser(model_dir)!r}; a folder of this name is not meant."
    )
  if os.path.exists(model_dir) and not os.path.isdir(model_dir):
    raise UserError(f"MODEL_DIR = {model_dir!r}: is a file; give a folder.")


def write_atomically(path: str, content: bytes) -> None:
  """Writes a file, and the folders above it; readers see all of it or nothing.

  Raises:
    UserError: the disk is full, or the path may not be written.
  """
  folder = os.path.dirname(os.path.abspath(path))
  with writing(folder, len(content)):
    os.makedirs(folder, exist_ok=True)
    # In the same folder, hence on the same disk: os.replace is atomic there.
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".partial_")
    try:
      with os.fdopen(descriptor, "wb") as file:
        file.write(content)
      # mkstemp gives 0o600; other files of the user have what umask leaves.
      os.chmod(temporary, 0o666 & ~_umask())
      os.replace(temporary, path)
    except BaseException:
      os.unlink(temporary)
      raise


@contextlib.contextmanager
def new_folder(path: str, needed_bytes: int) -> Iterator[str]:
  """Yields a temporary folder to fill, which is renamed to `path` at the end.

  Args:
    path: folder to make, with those above it.
    needed_bytes: upper bound of its size, for the message of a full disk.

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
        # Another process was first, and made the same: its folder stays.
        if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
          raise
    finally:
      shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def writing(path: str, needed_bytes: int | None) -> Iterator[None]:
  """Raises UserError in place of the OSError of writing `path`.

  Args:
    path: file or folder that the body writes.
    needed_bytes: upper bound of its size, None if unknown, for the message.
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
  # The system call that reads the mask sets it.
  mask = os.umask(0)
  os.umask(mask)
  return mask
