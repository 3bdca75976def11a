# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of files, and JSON that carries a hash of itself."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def hash_file(path: str) -> str:
  """Returns the BLAKE2b hash, 128 bits, of a file's bytes, in hexadecimal."""
  with open(path, "rb") as file:
    return hashlib.file_digest(file, _blake2b).hexdigest()


def sealed(content: Mapping[str, object], key: str) -> dict[str, Any]:
  """Returns JSON content with the hash of it at `key`, as it will be read."""
  content = json.loads(json.dumps(content))
  return {**content, key: _hash_content(content)}


def read_sealed(path: str, key: str) -> tuple[dict[str, Any], str]:
  """Returns the content of a JSON file without its hash, and the hash.

  Args:
    path: path of the file.
    key: where the hash is.

  Raises:
    OSError: the file cannot be read.
    ValueError: it is not JSON, or not what was sealed.
  """
  with open(path, encoding="utf-8") as file:
    content = json.load(file)
  if isinstance(content, dict):
    digest = content.pop(key, None)
    if digest == _hash_content(content):
      return content, digest
  raise ValueError(f"{path} is not what was sealed")


def _hash_content(content: Mapping[str, object]) -> str:
  text = json.dumps(content, sort_keys=True).encode()
  return hashlib.blake2b(text, digest_size=16).hexdigest()


def _blake2b():
  return hashlib.blake2b(digest_size=16)
