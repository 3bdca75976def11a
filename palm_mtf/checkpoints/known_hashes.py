# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Remembers the hashes of large files, so that each is hashed only once.

A command hashes a checkpoint before it uses the weights, and for a small model
that takes as long as to load them. The user's cache keeps each hash under the
file's device, inode, size, mtime and ctime. Only the kernel can set the ctime,
so a changed file has no known hash.
"""

import os
import time

from palm_mtf.machine.cache_folder import (
  CacheError,
  cache_path,
  open_cache,
  warn_of,
)
from palm_mtf.model_dir.foreign_files import hash_file

_LARGE_BYTES = 2**24  # hashing less is faster than a look-up
# A file that has just changed may change again within one tick of its ctime.
_SETTLED_SECS = 2.0
_MOST_KEPT = 256  # newest hashes to keep


def hash_unless_known(path: str) -> str:
  """Returns `hash_file` of a file; does not read an unchanged file again.

  Does not notice bits that a disk loses, because they change no time.

  Raises OSError if the file cannot be read.
  """
  before = os.stat(path)
  if before.st_size < _LARGE_BYTES:
    return hash_file(path)
  folder, name = os.path.split(cache_path("hashes", *_identity(before)))
  try:
    with open_cache(folder, make=True) as cache:
      if known := cache.load([name]).get(name):
        return known.decode()
      found = hash_file(path)
      is_settled = time.time() - before.st_ctime > _SETTLED_SECS
      if is_settled and _identity(os.stat(path)) == _identity(before):
        cache.keep_newest(name, found.encode(), _MOST_KEPT)
      return found
  except CacheError as error:
    warn_of(error)
    return hash_file(path)


def _identity(status: os.stat_result) -> list[str]:
  parts = "st_dev", "st_ino", "st_size", "st_mtime_ns", "st_ctime_ns"
  return [f"{part} {getattr(status, part)}" for part in parts]
