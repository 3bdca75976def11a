# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens, hashes and syncs the weight files of checkpoints.

A client calls the host functions in the server that has the files. Their
strings are bytes in UTF-8, as TensorFlow passes them.
"""

import contextlib
import fcntl
import glob
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Sequence

import numpy as np

from palm_mtf.model_dir.atomic_files import sync
from palm_mtf.model_dir.foreign_files import check_regular, hash_file
from palm_mtf.runtime.host_functions import host_function

_OPEN_FILES = "/dev/fd"  # the system's folder of this process's open files
_LINKS = "palm_mtf_links_"  # prefix of the temporary folders' names


class OpenWeights:
  """Holds the files of a TensorFlow checkpoint prefix open.

  A trainer may remove a checkpoint while another process reads it. Open files
  stay readable until `close` is called or the object is deleted.

  TensorFlow finds files by their prefix, so a temporary folder holds links to
  the open files. The folder's name has no special characters, because
  TensorFlow reads a prefix as a pattern, in which "[" begins a set of
  characters.
  """

  def __init__(self, prefix: str):
    """Opens the files "PREFIX.*"; raises OSError if a file is not regular."""
    folder, stem = os.path.split(prefix)
    with contextlib.ExitStack() as stack:
      self._paths = {}
      for name in os.listdir(folder or "."):
        if name.startswith(f"{stem}."):
          path = os.path.join(folder, name)
          check_regular(path)
          descriptor = os.open(path, os.O_RDONLY)
          stack.callback(os.close, descriptor)
          self._paths[name] = f"{_OPEN_FILES}/{descriptor}"
      self.prefix = prefix
      with contextlib.suppress(OSError):
        links = stack.enter_context(_folder_of_links())
        for name, path in self._paths.items():
          os.symlink(path, os.path.join(links, name))
        self.prefix = os.path.join(links, stem)
      # finalize also runs at the exit of Python: it closes the files, and
      # removes the temporary folder.
      self.close = weakref.finalize(self, stack.pop_all().close)

  def path(self, name: str) -> str:
    """Returns a path of the open file `name`, or raises FileNotFoundError."""
    if name not in self._paths:
      raise FileNotFoundError(2, "No such file or directory", name)
    return self._paths[name]


@contextlib.contextmanager
def _folder_of_links() -> Iterator[str]:
  """Yields a temporary folder, locked so that no other process removes it."""
  _remove_abandoned_folders()
  with tempfile.TemporaryDirectory(prefix=_LINKS) as folder:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
      # The kernel releases the lock when this process ends, even if it is
      # killed. If the file system has no locks, no process removes the folder.
      with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_SH)
      yield folder
    finally:
      os.close(descriptor)


def _remove_abandoned_folders() -> None:
  """Removes the folders that killed processes of this user have left."""
  within = glob.escape(tempfile.gettempdir())
  for path in glob.glob(os.path.join(within, f"{_LINKS}*")):
    with contextlib.ExitStack() as stack, contextlib.suppress(OSError):
      descriptor = os.open(path, os.O_DIRECTORY | os.O_NOFOLLOW)
      stack.callback(os.close, descriptor)
      fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
      if os.fstat(descriptor).st_uid == os.getuid():
        shutil.rmtree(path)


# Files that `open_weights` has opened in this process, by its `prefix`.
_open: dict[bytes, OpenWeights] = {}


@host_function
def make_empty_file(path: bytes) -> np.int32:
  """Makes a new file; returns errno, 0 on success."""
  try:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
  except OSError as error:
    return np.int32(error.errno)
  return np.int32(0)


@host_function
def seal_file(path: bytes) -> tuple[np.int64, bytes, np.int32]:
  """Syncs and hashes a file; returns size in bytes, hash, and errno or 0."""
  try:
    sync(path.decode())
    digest = hash_file(path.decode()).encode()
    return np.int64(os.path.getsize(path)), digest, np.int32(0)
  except OSError as error:
    return np.int64(0), b"", np.int32(error.errno)


@host_function
def open_weights(
  prefix: bytes, names: Sequence[bytes]
) -> tuple[np.ndarray, np.int32]:
  """Opens the files of a prefix; `close_weights` closes them.

  Args:
    prefix: TensorFlow's prefix of the files.
    names: names of the files to hash.

  Returns:
    The hashes, [len(names)] bytes, and errno, 0 on success.
  """
  try:
    files = _open[prefix] = OpenWeights(prefix.decode())
    hashes = [hash_file(files.path(x.decode())).encode() for x in names]
    return np.array(hashes, object), np.int32(0)
  except OSError as error:
    return np.array([b""] * len(names), object), np.int32(error.errno)


@host_function
def find_opened_prefix(prefix: bytes) -> bytes:
  """Maps the `prefix` given to `open_weights` to the prefix of the links."""
  return _open[prefix].prefix.encode()


@host_function
def close_weights(prefix: bytes) -> np.int32:
  """Closes the files that `open_weights` opened by `prefix`; returns 0."""
  if files := _open.pop(prefix, None):
    files.close()
  return np.int32(0)
