# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The GGUF format, version 3: metadata, a table of tensors, their bytes.

"GGUF"  version  number of tensors  number of keys
key     type value                             of each, in order
name    number of dims, dims, dtype, offset    of each tensor
bytes                                          of each, at multiples of 32

Numbers are little-endian; a text is its length and its UTF-8 bytes; dims are
written from the last to the first. The offset is from the first tensor's bytes.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import BinaryIO, NamedTuple

import numpy as np

from palm_mtf.export.gguf.dtypes import Dtype

_VERSION, _ALIGNMENT = 3, 32
_UINT32, _INT32, _FLOAT32, _BOOL, _TEXT, _ARRAY = 4, 5, 6, 7, 8, 9
# Of arrays that are neither texts nor lists of them.
_NUMPY_TYPES = {np.dtype("<i4"): _INT32, np.dtype("<f4"): _FLOAT32}

Value = bool | int | float | str | Sequence[str] | np.ndarray


class Tensor(NamedTuple):
  """A tensor of the table."""

  shape: tuple[int, ...]
  dtype: Dtype

  @property
  def num_bytes(self) -> int:
    """Size of its bytes, without what pads them."""
    *rows, columns = self.shape
    return math.prod(rows) * self.dtype.row_bytes(columns)


def write_gguf(
  path: str,
  metadata: Mapping[str, Value],
  tensors: Mapping[str, Tensor],
  read: Callable[[str], np.ndarray],
) -> None:
  """Writes a file, holding one tensor at a time.

  Args:
    path: path of the file.
    metadata: value of every key. A whole number is written as uint32, a list
      as texts, an array as int32 or float32, which it has.
    tensors: shape and dtype of every tensor, by name.
    read: returns the tensor of a name, float32.
  """
  header = bytearray(b"GGUF")
  header += _uint32(_VERSION) + _uint64(len(tensors)) + _uint64(len(metadata))
  for key, value in metadata.items():
    header += _text(key) + _typed(value)
  offset = 0
  for name, tensor in tensors.items():
    dims = b"".join(map(_uint64, reversed(tensor.shape)))
    header += _text(name) + _uint32(len(tensor.shape)) + dims
    header += _uint32(tensor.dtype.number) + _uint64(offset)
    offset += tensor.num_bytes + -tensor.num_bytes % _ALIGNMENT
  with open(path, "wb") as file:
    _write_aligned(file, header)
    for name, tensor in tensors.items():
      value = read(name)
      assert value.shape == tensor.shape, name
      _write_aligned(file, tensor.dtype.encode(value, name))


def _typed(value: Value) -> bytes:
  """Returns the type of a value and its bytes."""
  if isinstance(value, bool):  # before int, which it is too
    return _uint32(_BOOL) + bytes([value])
  if isinstance(value, int):
    return _uint32(_UINT32) + _uint32(value)
  if isinstance(value, float):
    return _uint32(_FLOAT32) + np.array(value, "<f4").tobytes()
  if isinstance(value, str):
    return _uint32(_TEXT) + _text(value)
  if isinstance(value, np.ndarray):
    kind, content = _NUMPY_TYPES[value.dtype], value.tobytes()
  else:
    kind, content = _TEXT, b"".join(map(_text, value))
  return _uint32(_ARRAY) + _uint32(kind) + _uint64(len(value)) + content


def _text(text: str) -> bytes:
  encoded = text.encode()
  return _uint64(len(encoded)) + encoded


def _uint32(number: int) -> bytes:
  return number.to_bytes(4, "little")


def _uint64(number: int) -> bytes:
  return number.to_bytes(8, "little")


def _write_aligned(file: BinaryIO, content: bytes | memoryview) -> None:
  file.write(content)
  file.write(bytes(-file.tell() % _ALIGNMENT))
