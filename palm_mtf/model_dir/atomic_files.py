# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes files and folders atomically; explains disk errors."""

import contextlib
import errno
import glob
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator

from palm_mtf.errors import UserError, check_no_address

# Errors for a full disk, an exceeded quota and an exceeded file size limit.
_NO_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
# Message of ndarray.tofile on a full disk, because its error has no errno.
_SHORT_WRITE = re.compile(r"\d+ requested and \d+ written")
# Prefix of the names of incomplete files and folders, which nothing reads.
PARTIAL = ".partial_"
# Incomplete files unchanged for so long are deleted: their writers were killed.
_ABANDONED_SECS = 3600.0


def check_model_dir(model_dir: object) -> None:
  """Raises UserError unless `model_dir` is, or can become, a folder's path."""
  if not isinstance(model_dir, str) or not model_dir:
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: give the path of a folder, such as "
      "'\"runs/first\"'."
    )
  # Shells expand "~", but gin does not, so a folder named "~" would be made.
  if model_dir.startswith("~"):
    raise UserError(
      f"MODEL_DIR = {model_dir!r}: give the whole path, such as "
      f"{os.path.expanduser(model_dir)!r}; a folder of this name is not meant."
    )
  check_no_address("MODEL_DIR", model_dir)
  if os.path.exists(model_dir) and not os.path.isdir(model_dir):
    raise UserError(f"MODEL_DIR = {model_dir!r}: is a file; give a folder.")


def write_atomically(
  path: str, content: bytes, *, replaces: bool = True
) -> None:
  """Writes a file, and missing folders above it; readers see no partial file.

  When this returns, the file is on the disk, even if the machine loses power.
  If `path` is a symbolic link, the file that it points to is replaced. A file
  that is replaced keeps its permissions. If `replaces` is False, an existing
  file stays.

  Raises UserError if the disk is full, or the path may not be written.
  """
  rename = os.replace if replaces else _rename_to_new
  path = os.path.realpath(path)
  with new_path(path, len(content), rename=rename) as temporary:
    with open(temporary, "xb") as file:
      file.write(content)
    with contextlib.suppress(FileNotFoundError):
      shutil.copymode(path, temporary)


def _rename_to_new(temporary: str, path: str) -> None:
  # os.link fails if the file exists. A check before os.replace would not
  # suffice, because another process could make the file after the check.
  try:
    os.link(temporary, path)
  except FileExistsError:
    pass
  except OSError:  # a file system without hard links
    os.replace(temporary, path)


def _remove_abandoned(prefix: str) -> None:
  """Removes the temporary files and folders of writers that were killed."""
  for path in glob.glob(f"{glob.escape(prefix)}*"):
    with contextlib.suppress(OSError):
      written = [path]
      for folder, _, names in os.walk(path):
        written += [os.path.join(folder, name) for name in names]
      if time.time() - max(map(os.path.getmtime, written)) > _ABANDONED_SECS:
        _remove(path)


def _remove(path: str) -> None:
  shutil.rmtree(path, ignore_errors=True)
  with contextlib.suppress(OSError):  # `path` was a folder, or is gone
    os.unlink(path)


@contextlib.contextmanager
def new_path(
  path: str,
  needed_bytes: int,
  make_way: Callable[[str], None] = lambda path: None,
  rename: Callable[[str, str], None] = os.rename,
) -> Iterator[str]:
  """Yields a temporary path for a file or folder, which is renamed to `path`.

  The content is on the disk before the rename, so that after a power loss,
  `path` has all of the content or none. The rename is on the disk when the
  context ends. If the body fails, new folders above `path` are removed.

  Args:
    path: file or folder to make, with the folders above it.
    needed_bytes: upper bound of the content's size, for messages.
    make_way: function that renames an existing file or folder at `path`, called
      when the content is on the disk.
    rename: function that renames the temporary path to `path`.

  Raises:
    UserError: the disk is full, or the path may not be written.
  """
  parent, name = os.path.split(path)
  made = [*_missing_folders(parent)]
  with writing(path, needed_bytes):
    partial = os.path.join(parent, f"{PARTIAL}{name}_")
    _remove_abandoned(partial)
    temporary = f"{partial}{secrets.token_hex(4)}"
    try:
      os.makedirs(parent, exist_ok=True)
      yield temporary
      for folder, _, names in os.walk(temporary, topdown=False):
        for each in names:
          sync(os.path.join(folder, each))
        sync(folder)
      if os.path.isfile(temporary):
        sync(temporary)
      if os.path.lexists(path):
        make_way(path)
      rename(temporary, path)
      sync(parent)
    finally:
      _remove(temporary)
      if not os.path.lexists(path):
        for folder in made:
          with contextlib.suppress(OSError):  # the folder may not be empty
            os.rmdir(folder)


def _missing_folders(path: str) -> Iterator[str]:
  """Yields the missing folders of a path, the deepest first."""
  while path and not os.path.lexists(path):
    yield path
    path = os.path.dirname(path)


def sync(path: str) -> None:
  """Waits until a file, or the names in a folder, are on the disk."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


@contextlib.contextmanager
def writing(path: str, needed_bytes: int | None) -> Iterator[None]:
  """Converts an OSError from writing `path` to a UserError.

  `needed_bytes` is an upper bound of the content's size; None if unknown.
  """
  try:
    yield
  except OSError as error:
    if error.errno in _NO_SPACE or _SHORT_WRITE.fullmatch(str(error)):
      needed = ""
      if needed_bytes:
        needed = f", which needs up to {needed_bytes:,} bytes"
      raise UserError(
        f"no disk space left for {path}{needed}; free some, or choose another "
        "folder."
      ) from None
    reason = error.strerror or str(error)
    raise UserError(
      f"cannot write {path}: {reason}; choose another folder."
    ) from None


@contextlib.contextmanager
def as_os_errors(but: tuple[type[Exception], ...] = ()) -> Iterator[None]:
  """Raises OSError in place of TensorFlow's errors, except those in `but`.

  `writing` turns only OSError into a message for the user.
  """
  from palm_mtf._tf import tf

  try:
    yield
  except but:
    raise
  except tf.errors.ResourceExhaustedError as error:  # no space left
    raise OSError(errno.ENOSPC, error.message) from error
  except tf.errors.OpError as error:
    raise OSError(errno.EIO, error.message) from error
