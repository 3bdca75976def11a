# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Arrays of .npy files, mapped without a file descriptor each.

np.memmap keeps one open for each array: a store of many shards would have more
than a process may (`ulimit -n`).
"""

import ctypes
import math
import mmap
import os
import weakref

import numpy as np

_C = ctypes.CDLL(None, use_errno=True)
_C.mmap.restype = ctypes.c_void_p
_C.mmap.argtypes = (
  ctypes.c_void_p,
  ctypes.c_size_t,
  *(ctypes.c_int,) * 3,
  ctypes.c_long,
)
_C.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_C.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
_FAILED = ctypes.c_void_p(-1).value


def map_array(path: str, *, is_random: bool = False) -> np.ndarray:
  """Returns the array of a .npy file; its pages are read when they are used.

  Args:
    path: path of the file.
    is_random: whether nothing is read ahead, where what is used is small and
      lies anywhere.

  Raises:
    OSError: the file cannot be mapped.
    ValueError: it has no header of an array.
  """
  with open(path, "rb") as file:
    np.lib.format.read_magic(file)
    shape, _, dtype = np.lib.format.read_array_header_1_0(file)
    begin, count = file.tell(), math.prod(shape)
    if not count:  # nothing cannot be mapped
      return np.empty(shape, dtype)
    num_bytes = begin + count * dtype.itemsize
    content = _map(file.fileno(), num_bytes, path, is_random)
  values = np.frombuffer(content, dtype, count, begin).reshape(shape)
  values.flags.writeable = False  # a page of the file, mapped to be read
  return values


def _map(
  descriptor: int, num_bytes: int, path: str, is_random: bool
) -> ctypes.Array:
  if os.fstat(descriptor).st_size < num_bytes:
    raise ValueError(f"{path} is cut short")  # to read beyond is a signal
  address = _C.mmap(
    None, num_bytes, mmap.PROT_READ, mmap.MAP_SHARED, descriptor, 0
  )
  if address == _FAILED:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)
  if is_random:
    # Advice: a system that does not know it reads ahead.
    _C.madvise(address, num_bytes, mmap.MADV_RANDOM)
  content = (ctypes.c_char * num_bytes).from_address(address)
  release = weakref.finalize(content, _C.munmap, address, num_bytes)
  # At the end of the process a thread may still read.
  release.atexit = False
  return content
