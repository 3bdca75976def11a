# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes files, and seals JSON objects: adds a key with the content's hash."""

import functools
import hashlib
import json
from collections.abc import Mapping
from typing import Any

from palm_mtf.json_text import json_text
from palm_mtf.model_dir.foreign_files import read_regular

# Larger files are refused. The manifest of a 10,000-layer model has 20 MB.
_MAX_BYTES = 2**28
_BLAKE2B = functools.partial(hashlib.blake2b, digest_size=16)


def hash_file(path: str) -> str:
  """Returns the BLAKE2b hash of a file, 128 bits, in hexadecimal."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, _BLAKE2B).hexdigest()


def seal(content: Mapping[str, object], key: str) -> dict[str, Any]:
  """Returns `content` as JSON values, with its hash added at `key`."""
  # Hash what a reader of the JSON gets, because JSON turns tuples into lists.
  content = json.loads(json_text(content))
  return {**content, key: _hash_content(content)}


def read_sealed(path: str, key: str) -> tuple[dict[str, Any], str]:
  """Returns the content of a sealed JSON file, and the hash at its `key`.

  Raises:
    OSError: the file cannot be read, or is not a regular file.
    ValueError: the file is not JSON, or its content does not match its hash.
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


def _hash_content(content: Mapping[str, object]) -> str:
  # Keys are sorted, so that their order in the file does not matter.
  text = json.dumps(content, sort_keys=True).encode()
  return _BLAKE2B(text).hexdigest()
