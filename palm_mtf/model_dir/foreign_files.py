# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads files after checking their type, their size and, if any, their seal.

A sealed JSON object has a key with the hash of its other content, so that a
reader notices any change.
"""

import errno
import functools
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text

_READ_BYTES = 2**20
# Refuse larger files, which could fill the memory. For scale: the index of the
# tensors of a 10,000-layer model has 10 MB.
_MAX_JSON_BYTES = 20_000_000


def check_regular(path: str) -> int:
  """Returns the size of a regular file, in bytes.

  Files of other types must not be read, because opening a FIFO waits for a
  writer, and a device may have no end.

  Raises OSError if `path` is missing, or is a folder, FIFO, socket or device.
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

  Raises OSError if `check_regular` fails, or the file is larger.
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

  Raises UserError if the file cannot be read, or does not hold a JSON object.
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


# Refuse larger files, so that a damaged file cannot fill the memory. For scale:
# a checkpoint's manifest has 20 MB for a 10,000-layer model.
_MAX_BYTES = 2**28
MANIFEST = "manifest.json"  # of a sealed folder
_BLAKE2B = functools.partial(hashlib.blake2b, digest_size=16)


def hash_file(path: str) -> str:
  """Returns the BLAKE2b hash of a file, 128 bits, in hexadecimal."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, _BLAKE2B).hexdigest()


def seal(content: Mapping[str, object], key: str = "seal") -> dict[str, Any]:
  """Returns `content` as JSON values, with its hash added at `key`."""
  # Hash what a reader of the JSON gets, because JSON turns tuples into lists.
  content = json.loads(json_text(content))
  return {**content, key: _hash_content(content)}


def read_sealed(path: str, key: str = "seal") -> tuple[dict[str, Any], str]:
  """Returns the content of a sealed JSON file, and the hash at its `key`.

  Raises OSError if the file cannot be read, or is not a regular file. Raises
  ValueError if the file is not JSON, or its content does not match its hash.
  """
  try:
    content = json.loads(read_regular(path, _MAX_BYTES))
  except RecursionError:  # nested too deep
    content = None
  if isinstance(content, dict):
    digest = content.pop(key, None)
    if digest == _hash_content(content):
      return content, digest
  raise ValueError(f"{path} is not what was sealed")


def seal_folder(folder: str, content: Mapping[str, object]) -> None:
  """Writes what a folder is, and the hashes of all its files, which exist."""
  hashes = {x: hash_file(f"{folder}/{x}") for x in os.listdir(folder)}
  with open(f"{folder}/{MANIFEST}", "w", encoding="utf-8") as file:
    file.write(json_text(seal({**content, "hashes": hashes})))


def open_folder(folder: str) -> tuple[dict[str, Any], str]:
  """Returns the content that `seal_folder` wrote, and its hash.

  Raises OSError, ValueError or LookupError if a file is missing or changed.
  """
  content, digest = read_sealed(f"{folder}/{MANIFEST}")
  hashes = content["hashes"]
  if not isinstance(hashes, dict):
    raise ValueError(f"{folder}/{MANIFEST} has no hashes of files")
  for name, expected in hashes.items():
    path = f"{folder}/{name}"
    if check_regular(path) and hash_file(path) != expected:
      raise ValueError(f"{path} is not what was sealed")
  return content, digest


def _hash_content(content: Mapping[str, object]) -> str:
  # Keys are sorted, so that their order in the file does not matter.
  text = json.dumps(content, sort_keys=True).encode()
  return _BLAKE2B(text).hexdigest()
