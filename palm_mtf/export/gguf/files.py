# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes GGUF files; the gguf package converts their tensors.

  "GGUF"     then the version, the numbers of tensors and of keys
  keys       each a name, a type and a value
  tensors    each a name, dimensions, a type and an offset
  data       the tensors, in the order of the header, each at the next multiple
             of general.alignment bytes

Numbers are little-endian. All lengths are checked against the file's size. As
llama.cpp does, refuse tensors that overlap, leave a hole or lie beyond the end,
arrays of arrays, and repeated names.
"""

import math
import struct
import types
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from palm_mtf.errors import UserError, shorten
from palm_mtf.export.gguf.metadata import Value
from palm_mtf.export.gguf.mixtures import (
  GGUF_NAMES,
  Shapes,
  choose_dtypes,
  count_bytes,
)
from palm_mtf.export.huggingface.tensor_files import check_finite
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


class _Walk:
  """Reads a header in order. Methods raise ValueError for a broken file."""

  def __init__(self, file: BinaryIO, size: int):
    self._file, self._size = file, size
    self._left, self._numbers_left = min(size, _MOST_BYTES), _MOST_NUMBERS

  def read_all(self) -> tuple[dict[str, Any], dict[str, TensorPlace]]:
    """Returns {key: value}, whose arrays are lists, and {tensor: its place}."""
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
    return metadata, self._place(tensors, alignment)

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


_LARGEST_INT8 = np.float32(127)


class GgufFile:
  """A GGUF file, whose tensors are memory-mapped.

  Attributes:
    metadata: {key: value}; arrays are lists.
    places: {name of a tensor: where the file has it}.
    shapes: {name of a tensor: shape}.
    dtypes: {name of a tensor: type in GGUF, such as "Q4_K"}.
  """

  def __init__(self, path: str):
    """Reads the header; raises UserError if there is no complete GGUF file."""
    self._path = path
    try:
      size = check_regular(path)
      with open(path, "rb") as file:
        self.metadata, self.places = _Walk(file, size).read_all()
    except OSError as error:
      raise UserError(f"{path}: {error.strerror or error}.") from None
    except UserError as error:
      raise UserError(f"{path}: {error}") from None
    except (ValueError, struct.error) as error:
      raise UserError(
        f"{path}: is no whole GGUF file: {shorten(str(error))}; copy it again."
      ) from None
    self.shapes = {name: x.shape for name, x in self.places.items()}
    self.dtypes = {name: x.dtype for name, x in self.places.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32; dequantizes it if it is quantized.

    Raises UserError if the gguf package does not read the tensor's type, or a
    number is not finite.
    """
    from gguf import GGMLQuantizationType, quants

    place = self.places[name]
    rows = (*place.shape[:-1], place.row_bytes)
    data = np.memmap(self._path, np.uint8, "r", place.offset, rows)
    try:
      value = quants.dequantize(data, GGMLQuantizationType[place.dtype])
    except NotImplementedError:
      raise UserError(
        f"{self._path}: its {name} is {self.dtypes[name]}, which is not read; "
        "give a file with K-quants, q4_0 to q8_0 or floats."
      ) from None
    value = np.asarray(value, np.float32).reshape(self.shapes[name])
    check_finite(value, self._path, name)
    return value


def write_gguf(
  path: str,
  metadata: Mapping[str, Value],
  shapes: Shapes,
  dtype: str,
  read: Callable[[str], np.ndarray],
  importance: Mapping[str, np.ndarray] = types.MappingProxyType({}),
) -> None:
  """Writes a GGUF file, with one tensor at a time in memory.

  Args:
    path: path of the file.
    metadata: the file's keys.
    shapes: {tensor's name: shape}.
    dtype: one of FILE_TYPES, the type of most weights.
    read: function that returns the float32 tensor that has a name.
    importance: {tensor: mean square of each input, [inputs], or [experts,
      inputs] for tensors of experts}, for types with a search for scales.

  Raises UserError if a weight, or a scale of q8_0, is beyond the range of
  float16; or if C++ cannot be compiled, which quantizes to types with a search.
  """
  from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter

  writer = GGUFWriter(path, metadata["general.architecture"])
  for key, value in metadata.items():
    is_int = type(value) is int
    kind = GGUFValueType.UINT32 if is_int else GGUFValueType.get_type(value)
    if key != "general.architecture":  # GGUFWriter itself adds this key
      writer.add_key_value(key, value, kind)
  dtypes = choose_dtypes(shapes, dtype, metadata)
  for name, shape in shapes.items():
    num_bytes = count_bytes({name: shape}, dtypes)
    kind = GGMLQuantizationType[GGUF_NAMES[dtypes[name]]]
    writer.add_tensor_info(name, shape, np.dtype(np.float32), num_bytes, kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for name in shapes:
    data = _convert(read(name), dtypes[name], name, importance.get(name))
    writer.write_tensor_data(data)
  writer.close()


def _convert(
  x: np.ndarray, dtype: str, name: str, importance: np.ndarray | None
) -> np.ndarray:
  # Converts one expert at a time, which takes less memory than all at once.
  from gguf import GGMLQuantizationType, quants

  from palm_mtf.native.blocks import BLOCK_TYPES, quantize

  if x.ndim > 2:
    factors = [None] * len(x) if importance is None else importance
    first = _convert(x[0], dtype, name, factors[0])
    found = np.empty([len(x), *first.shape], first.dtype)
    for i, part in enumerate(x):
      found[i] = _convert(part, dtype, name, factors[i])
    return found
  x = np.ascontiguousarray(x, np.float32)
  _check_range(x, dtype, name)
  if dtype not in BLOCK_TYPES:
    return quants.quantize(x, GGMLQuantizationType[GGUF_NAMES[dtype]])
  quantized = quantize(x, dtype, importance)
  if quantized is None:
    raise UserError(
      f"--dtype: {dtype} needs C++, which could not be compiled (see above); "
      "use q8_0."
    )
  return quantized


def _check_range(x: np.ndarray, dtype: str, name: str) -> None:
  # Raises UserError if an element, or a scale of q8_0, overflows float16.
  largest = np.abs(x).max() / (_LARGEST_INT8 if dtype == "q8_0" else 1)
  with np.errstate(over="ignore"):
    is_finite = np.isfinite(largest.astype(np.float16))
  if dtype != "float32" and not is_finite:
    raise UserError(
      f"--dtype = {dtype!r}: numbers of {name} are beyond float16; use float32."
    )
