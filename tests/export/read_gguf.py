# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads GGUF files, written only after the format's specification."""

import struct
from typing import NamedTuple

import numpy as np

_NUMBERS = {4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q"}
_TEXT, _ARRAY = 8, 9
_Q8_0 = np.dtype([("scale", "<f2"), ("numbers", "i1", 32)])


class Gguf(NamedTuple):
  metadata: dict[str, object]
  tensors: dict[str, np.ndarray]  # float32
  dtypes: dict[str, int]


def read_gguf(path) -> Gguf:
  """Returns everything in a file."""
  content, at = path.read_bytes(), 4
  assert content[:4] == b"GGUF"

  def number(form):
    nonlocal at
    (value,) = struct.unpack_from(form, content, at)
    at += struct.calcsize(form)
    return value

  def text():
    nonlocal at
    length = number("<Q")
    at += length
    return content[at - length : at].decode()

  def value(kind):
    if kind == _TEXT:
      return text()
    if kind == _ARRAY:
      of, length = number("<I"), number("<Q")
      return [value(of) for _ in range(length)]
    return number(_NUMBERS[kind])

  assert number("<I") == 3
  num_tensors, num_keys = number("<Q"), number("<Q")
  metadata = {text(): value(number("<I")) for _ in range(num_keys)}
  table = {}
  for _ in range(num_tensors):
    name = text()
    dims = [number("<Q") for _ in range(number("<I"))]
    table[name] = (dims[::-1], number("<I"), number("<Q"))
  start = -(-at // 32) * 32
  tensors = {
    name: _tensor(content, start + offset, shape, dtype)
    for name, (shape, dtype, offset) in table.items()
  }
  return Gguf(metadata, tensors, {name: x[1] for name, x in table.items()})


def _tensor(content, offset, shape, dtype):
  assert offset % 32 == 0
  size = int(np.prod(shape))
  if dtype == 8:
    blocks = np.frombuffer(content, _Q8_0, size // 32, offset)
    x = blocks["scale"].astype(np.float32)[:, None] * blocks["numbers"]
  else:
    x = np.frombuffer(content, ["<f4", "<f2"][dtype], size, offset)
  return x.astype(np.float32).reshape(shape)
