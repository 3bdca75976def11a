# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads files that other programs wrote, after checking their type and size."""

import errno
import json
import os
import reprlib
import stat
from typing import Any

from palm_mtf.errors import UserError

_READ_BYTES = 2**20
# Larger files are refused. A 10,000-layer model's index of tensors has 10 MB.
_MAX_JSON_BYTES = 20_000_000

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 200
_short.maxlevel = 3


def check_regular(path: str) -> int:
  """Returns the size of a regular file, in bytes.

  Files of other types must not be read, because opening a FIFO waits for a
  writer, and a device may have no end.

  Raises:
    OSError: `path` is missing, or is a folder, FIFO, socket or device.
  """
  found = os.stat(path)
  mode = found.st_mode
  if stat.S_ISDIR(mode):
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
  if not stat.S_ISREG(mode):
    kind = "socket" if stat.S_ISSOCK(mode) else "device"
    kind = "FIFO" if stat.S_ISFIFO(mode) else kind
    raise OSError(errno.EINVAL, f"is a {kind}, not a regular file", path)
  return found.st_size


def read_regular(path: str, most_bytes: int) -> bytes:
  """Returns the content of a regular file of at most `most_bytes` bytes.

  Raises:
    OSError: `check_regular` fails, or the file is larger than `most_bytes`.
  """
  if (size := check_regular(path)) <= most_bytes:
    parts, size = [], 0
    with open(path, "rb") as file:
      # Read in parts, because files in /proc have st_size 0, and a single read
      # of most_bytes would reserve that much memory.
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


def read_json_object(path: str, hint: str) -> dict[str, Any]:
  """Returns the JSON object in a file.

  `hint` tells the user what to do if the file cannot be read.

  Raises:
    UserError: the file cannot be read, or does not hold a JSON object.
  """
  try:
    found = json.loads(read_regular(path, _MAX_JSON_BYTES).decode())
  except OSError as error:
    raise UserError(f"{path}: {error.strerror}; {hint}.") from None
  # Python also raises ValueError for an integer with too many digits, and
  # RecursionError for too many nested brackets.
  except (ValueError, RecursionError):
    found = None
  if not isinstance(found, dict):
    raise UserError(f"{path}: is no JSON object; copy it again.")
  return found


def short_repr(value: object) -> str:
  """Returns the `repr` of a value, shortened to fit into a message."""
  return _short.repr(value)
