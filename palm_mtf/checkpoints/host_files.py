# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a host does with files of checkpoints: a session calls it there.

Strings are bytes in UTF-8, as TensorFlow has them.
"""

import os
from collections.abc import Sequence

import numpy as np

from palm_mtf.checkpoints.open_weights import OpenWeights
from palm_mtf.model_dir.atomic_files import sync
from palm_mtf.model_dir.sealed import hash_file

# Open files of this process, by the prefix that they were opened by.
_open: dict[bytes, OpenWeights] = {}


def leave_mark(path: bytes) -> np.int32:
  """Makes an empty file; returns the error number, 0 if there is none."""
  try:
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
  except OSError as error:
    return np.int32(error.errno)
  return np.int32(0)


def seal_file(path: bytes) -> tuple[np.int64, bytes, np.int32]:
  """Waits until a file is on the disk.

  Returns:
    Its size in bytes, its hash, and the error number, 0 if there is none.
  """
  try:
    sync(path.decode())
    return (
      np.int64(os.path.getsize(path)),
      hash_file(path.decode()).encode(),
      np.int32(0),
    )
  except OSError as error:
    return np.int64(0), b"", np.int32(error.errno)


def open_weights(
  prefix: bytes, names: Sequence[bytes]
) -> tuple[np.ndarray, np.int32]:
  """Opens the weights of a prefix until `close_weights`.

  Args:
    prefix: TensorFlow's prefix of the files.
    names: names of files to hash.

  Returns:
    The hash of each file, [files] bytes, and the error number, 0 if none.
  """
  try:
    files = _open[prefix] = OpenWeights(prefix.decode())
    hashes = [hash_file(files.path(x.decode())).encode() for x in names]
    return np.array(hashes, object), np.int32(0)
  except OSError as error:
    return np.array([b""] * len(names), object), np.int32(error.errno)


def opened_prefix(prefix: bytes) -> bytes:
  """Returns the prefix by which TensorFlow reads what `open_weights` opened."""
  return _open[prefix].prefix.encode()


def close_weights(prefix: bytes) -> np.int32:
  """Closes the weights of a prefix."""
  if files := _open.pop(prefix, None):
    files.close()
  return np.int32(0)


# What a server registers.
HOST_FUNCTIONS = (
  leave_mark,
  seal_file,
  open_weights,
  opened_prefix,
  close_weights,
)
