# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A file of decisions: a hash, a line of counts, a byte for each document."""

import hashlib
import json
import logging
import zlib
from collections.abc import Sequence

import numpy as np

from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically

_logger = logging.getLogger(__name__)
_HASH_BYTES = 16


def write_decisions(path: str, decisions: Sequence[np.ndarray]) -> None:
  """Writes the decisions on the documents of each source.

  Args:
    path: path of the file.
    decisions: decisions by source, each [documents], uint8.

  Raises:
    UserError: the disk is full, or the path may not be written.
  """
  counts = json_text([len(each) for each in decisions]).encode()
  # Most documents are kept: compressed, a million of them take a few KB.
  content = zlib.compress(counts + b"\n" + b"".join(decisions), 1)
  write_atomically(path, _hash(content) + content)


def read_decisions(path: str) -> list[np.ndarray] | None:
  """Returns what `write_decisions` wrote, or None without a whole file."""
  try:
    with open(path, "rb") as file:
      found, content = file.read(_HASH_BYTES), file.read()
  except OSError:
    return None
  if found != _hash(content):
    _logger.warning(f"{path} is damaged: its documents are filtered anew")
    return None
  counts, _, flat = zlib.decompress(content).partition(b"\n")
  ends = np.cumsum(json.loads(counts))
  return np.split(np.frombuffer(flat, np.uint8), ends[:-1])


def _hash(content: bytes) -> bytes:
  return hashlib.blake2b(content, digest_size=_HASH_BYTES).digest()
