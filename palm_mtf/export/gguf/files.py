# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads and writes tensors of GGUF files, with the gguf package."""

import math
from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.export.gguf.architectures import Value
from palm_mtf.export.gguf.header import read_header
from palm_mtf.export.huggingface.tensor_files import check_finite

Shapes = Mapping[str, tuple[int, ...]]

# {dtype of most weights: value of GGUF's key general.file_type}
FILE_TYPES = {"float32": 0, "float16": 1, "q8_0": 7}
_GGUF_NAMES = {"float32": "F32", "float16": "F16", "q8_0": "Q8_0"}
# In q8_0, _BLOCK elements of a row share a float16 scale: max |x| / 127.
_BLOCK, _LARGEST_INT8 = 32, np.float32(127)


class GgufFile:
  """A GGUF file, whose tensors are memory-mapped.

  Attributes:
    metadata: {key: value}.
    shapes: {name of a tensor: shape}.
    dtypes: {name of a tensor: type in GGUF, such as "Q4_K"}.
  """

  def __init__(self, path: str):
    """Reads the header.

    Raises:
      UserError: if there is no such file, or it is not a complete GGUF file.
    """
    self._path = path
    self.metadata, self._places = read_header(path)
    self.shapes = {name: x.shape for name, x in self._places.items()}
    self.dtypes = {name: x.dtype for name, x in self._places.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32; dequantizes it if it is quantized.

    Raises:
      UserError: if the gguf package does not read the tensor's type, or a
        number is not finite.
    """
    from gguf import GGMLQuantizationType, quants

    place = self._places[name]
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
) -> None:
  """Writes a GGUF file, with one tensor at a time in memory.

  `shapes` is {tensor's name: shape}, and `read` returns the float32 tensor that
  has a name.

  Raises:
    UserError: if a weight, or a scale of q8_0, is beyond the range of float16.
  """
  from gguf import GGMLQuantizationType, GGUFValueType, GGUFWriter, quants

  writer = GGUFWriter(path, metadata["general.architecture"])
  for key, value in metadata.items():
    is_int = type(value) is int
    kind = GGUFValueType.UINT32 if is_int else GGUFValueType.get_type(value)
    if key != "general.architecture":  # GGUFWriter itself adds this key
      writer.add_key_value(key, value, kind)
  dtypes = {
    name: choose_dtype(name, shape, dtype) for name, shape in shapes.items()
  }
  types = {k: GGMLQuantizationType[_GGUF_NAMES[x]] for k, x in dtypes.items()}
  for name, shape in shapes.items():
    num_bytes = count_bytes(shape, dtypes[name])
    writer.add_tensor_info(
      name, shape, np.dtype(np.float32), num_bytes, types[name]
    )
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_ti_data_to_file()
  for name in shapes:
    x = np.ascontiguousarray(read(name), np.float32)
    _check_range(x, dtypes[name], name)
    writer.write_tensor_data(quants.quantize(x, types[name]))
  writer.close()


def choose_dtype(name: str, shape: tuple[int, ...], wanted: str) -> str:
  """Returns a tensor's dtype in a file where most weights have `wanted`."""
  # llama.cpp reads scales, biases and learned positions only in float32.
  if len(shape) == 1 or name.startswith("position_embd"):
    return "float32"
  return "float16" if wanted == "q8_0" and shape[-1] % _BLOCK else wanted


def count_bytes(shape: tuple[int, ...], dtype: str) -> int:
  """Returns how many bytes a tensor takes in a file."""
  size = math.prod(shape)
  if dtype == "q8_0":
    return size // _BLOCK * (2 + _BLOCK)
  return size * (2 if dtype == "float16" else 4)


def _check_range(x: np.ndarray, dtype: str, name: str) -> None:
  # Raises UserError if an element, or a scale of q8_0, overflows float16.
  largest = np.abs(x).max() / (_LARGEST_INT8 if dtype == "q8_0" else 1)
  with np.errstate(over="ignore"):
    is_finite = np.isfinite(largest.astype(np.float16))
  if dtype != "float32" and not is_finite:
    raise UserError(
      f"--dtype = {dtype!r}: numbers of {name} are beyond float16; use float32."
    )
