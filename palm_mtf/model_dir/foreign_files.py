# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files that other programs wrote: checks before a byte of them is read."""

import errno
import os
import stat


def check_regular(path: str) -> int:
  """Returns the size of a regular file, in bytes.

  To open a FIFO waits for a writer, and a device may have no end.

  Raises:
    OSError: `path` is missing, or is a folder, FIFO, socket or device.
  """
  found = os.stat(path)
  if stat.S_ISDIR(found.st_mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
  if not stat.S_ISREG(found.st_mode):
    kind = next(name for is_kind, name in _KINDS if is_kind(found.st_mode))
    raise OSError(errno.EINVAL, f"is a {kind}, not a regular file", path)
  return found.st_size


_KINDS = (
  (stat.S_ISFIFO, "FIFO"),
  (stat.S_ISSOCK, "socket"),
  (lambda _: True, "device"),
)


_READ_BYTES = 2**20


def read_regular(path: str, most_bytes: int) -> bytes:
  """Returns the content of a regular file.

  Args:
    path: path of the file.
    most_bytes: size above which nothing is read.

  Raises:
    OSError: as `check_regular`, or the file is larger.
  """
  if (size := check_regular(path)) <= most_bytes:
    parts, size = [], 0
    with open(path, "rb") as file:
      # Files of /proc have no size. A single read of most_bytes would reserve
      # memory for as many.
      while size <= most_bytes and (part := file.read(_READ_BYTES)):
        parts.append(part)
        size += len(part)
    if size <= most_bytes:
      return b"".join(parts)
  raise OSError(
    errno.EFBIG,
    f"has {size:,} bytes or more, at most {most_bytes:,} are read",
    path,
  )
