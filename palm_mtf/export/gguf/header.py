# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the header of a GGUF file, with all lengths checked against its size.

  "GGUF"     then the version, the numbers of tensors and of keys
  keys       each a name, a type and a value
  tensors    each a name, dimensions, a type and an offset
  data       the tensors, in the order of the header, each at the next multiple
             of general.alignment bytes

Numbers are little-endian. As llama.cpp does, refuse tensors that overlap, leave
a hole or lie beyond the end, arrays of arrays, and repeated names.
"""

import math
import struct
from typing import Any, BinaryIO, NamedTuple

from palm_mtf.errors import UserError, shorten
from palm_mtf.model_dir.foreign_files import check_regular

_VERSIONS = (2, 3)  # version 1, with 32-bit lengths, is not read
_COUNT = "Q"  # format of a length or an offset, for the module struct
# {GGUF's number of a type: its format for the module struct}
_NUMBERS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_MOST_DIMENSIONS = 4  # per tensor, as in llama.cpp
# The header of a model with 260,000 tokens and 500,000 merges is 16 MB. It has
# 1.3 million numbers, such as the length of each text. Without a limit on them,
# reading millions of tiny texts would take gigabytes of memory.
_MOST_BYTES, _MOST_NUMBERS = 2**26, 2**22


class TensorPlace(NamedTuple):
  """Where a file has a tensor, and how it stores the tensor."""

  shape: tuple[int, ...]
  dtype: str  # type in GGUF, such as "Q4_K"
  offset: int  # position of its first byte in the file
  row_bytes: int  # bytes per row, along the last dimension


class GgufHeader(NamedTuple):
  """What is before the data of a GGUF file."""

  metadata: dict[str, Any]  # {key: value}; arrays are lists
  tensors: dict[str, TensorPlace]


def read_header(path: str) -> GgufHeader:
  """Returns the header of a file.

  Raises:
    UserError: if there is no such file, or it is not a complete GGUF file.
  """
  try:
    size = check_regular(path)
    with open(path, "rb") as file:
      return _Walk(file, size).read_all()
  except FileNotFoundError:
    raise UserError(f"{path}: no such file.") from None
  except OSError as error:
    raise UserError(f"{path}: {error.strerror or error}.") from None
  except UserError as error:
    raise UserError(f"{path}: {error}") from None
  except (ValueError, struct.error) as error:
    raise UserError(
      f"{path}: is no whole GGUF file: {shorten(str(error))}; copy it again."
    ) from None


class _Walk:
  """Reads a header in order. Methods raise ValueError for a broken file."""

  def __init__(self, file: BinaryIO, size: int):
    self._file, self._size = file, size
    self._left, self._numbers_left = min(size, _MOST_BYTES), _MOST_NUMBERS

  def read_all(self) -> GgufHeader:
    if self._take(4) != b"GGUF":
      raise ValueError("it does not begin with GGUF")
    (version,) = self._numbers("I")
    # A big-endian file has its version in the upper bytes.
    if version % 2**16 == 0:
      raise UserError(
        "is a big-endian GGUF file; convert the model for little-endian."
      )
    if version not in _VERSIONS:
      raise ValueError(f"it has version {version}; 2 and 3 are read")
    num_tensors, num_keys = self._numbers(_COUNT, 2)
    metadata: dict[str, Any] = {}
    for _ in range(num_keys):
      key = self._text()
      if key in metadata:
        raise ValueError(f"it has the key {key} twice")
      metadata[key] = self._value(key)
    tensors = [self._tensor() for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    is_size = type(alignment) is int and alignment > 0
    if not is_size or alignment.bit_count() > 1:
      raise ValueError(f"general.alignment = {alignment} is no power of 2")
    return GgufHeader(metadata, self._place(tensors, alignment))

  def _place(self, tensors: list, alignment: int) -> dict[str, TensorPlace]:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    found: dict[str, TensorPlace] = {}
    start, end = -self._file.tell() % alignment + self._file.tell(), 0
    for name, shape, kind, offset in tensors:
      if name in found:
        raise ValueError(f"it has the tensor {name} twice")
      dtype = GGMLQuantizationType(kind)
      block, block_bytes = GGML_QUANT_SIZES[dtype]
      if not shape or min(shape) < 1 or shape[-1] % block:
        raise ValueError(f"{name} is {shape} in blocks of {block}")
      if offset != end:
        raise ValueError(f"{name} begins at byte {offset:,}, not at {end:,}")
      row_bytes = shape[-1] // block * block_bytes
      end += math.prod(shape[:-1]) * row_bytes
      if start + end > self._size:
        raise ValueError(f"{name} ends beyond the file's {self._size:,} bytes")
      found[name] = TensorPlace(shape, dtype.name, start + offset, row_bytes)
      end += -end % alignment
    return found

  def _tensor(self) -> tuple[str, tuple[int, ...], int, int]:
    name = self._text()
    (rank,) = self._numbers("I")
    if rank > _MOST_DIMENSIONS:
      raise ValueError(f"{name} has {rank} dimensions")
    shape = self._numbers(_COUNT, rank)[::-1]
    (kind,), (offset,) = self._numbers("I"), self._numbers(_COUNT)
    return name, shape, kind, offset

  def _value(self, key: str) -> Any:
    (kind,) = self._numbers("I")
    if kind != _ARRAY:
      return self._items(key, kind, 1)[0]
    (kind,), (count,) = self._numbers("I"), self._numbers(_COUNT)
    return self._items(key, kind, count)

  def _items(self, key: str, kind: int, count: int) -> list:
    if kind == _TEXT:
      return [self._text() for _ in range(count)]
    if kind not in _NUMBERS:
      is_array = "is an array of arrays" if kind == _ARRAY else ""
      raise ValueError(f"{key} {is_array or f'has the unknown type {kind}'}")
    return [*self._numbers(_NUMBERS[kind], count)]

  def _text(self) -> str:
    (length,) = self._numbers(_COUNT)
    return self._take(length).decode()

  def _numbers(self, form: str, count: int = 1) -> tuple:
    size = struct.calcsize(f"<{form}")
    self._numbers_left -= count
    if self._left >= count * size and self._numbers_left < 0:
      raise ValueError(f"the header has over {_MOST_NUMBERS:,} numbers")
    return struct.unpack(f"<{count}{form}", self._take(count * size))

  def _take(self, count: int) -> bytes:
    self._left -= count
    if self._left < 0:
      raise ValueError(
        f"the header goes beyond the file, or has over {_MOST_BYTES:,} bytes"
      )
    return self._file.read(count)
