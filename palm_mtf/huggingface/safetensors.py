# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: a JSON header, then the bytes of all tensors.

8 bytes   length of the header, little-endian
header    {name: {"dtype": "F32", "shape": [...], "data_offsets": [a, b]}}
bytes     of each tensor in row-major order, [a, b) from the header's end
"""

import json
import math
import os
from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.errors import UserError

_ALIGNMENT = 8  # of the first tensor, as the format's own library writes it
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format's own library
_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}


def write_safetensors(
  path: str,
  shapes: Mapping[str, tuple[int, ...]],
  read: Callable[[str], np.ndarray],
) -> None:
  """Writes float32 tensors to a file, holding one at a time.

  Args:
    path: path of the file.
    shapes: shape of every tensor, by name.
    read: returns the tensor of a name.
  """
  header: dict[str, object] = {"__metadata__": {"format": "pt"}}
  end = 0
  for name, shape in shapes.items():
    begin, end = end, end + 4 * math.prod(shape)
    header[name] = {
      "dtype": "F32",
      "shape": list(shape),
      "data_offsets": [begin, end],
    }
  text = json.dumps(header, separators=(",", ":")).encode()
  text += b" " * (-len(text) % _ALIGNMENT)
  with open(path, "wb") as file:
    file.write(len(text).to_bytes(8, "little") + text)
    for name, shape in shapes.items():
      tensor = np.ascontiguousarray(read(name), "<f4")
      assert tensor.shape == tuple(shape), name
      file.write(tensor.data)


class SafetensorsFile:
  """A safetensors file, mapped into memory."""

  def __init__(self, path: str):
    """Reads the header.

    Raises:
      UserError: there is no such file, or it is no whole safetensors file.
    """
    self._path = path
    try:
      size = os.path.getsize(path)
      with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _MAX_HEADER_BYTES):
          raise ValueError
        header = json.loads(file.read(length))
      header.pop("__metadata__", None)
      self._start = 8 + length
      self._entries = {
        name: (x["dtype"], tuple(x["shape"]), x["data_offsets"][0])
        for name, x in header.items()
      }
      ends = [x["data_offsets"][1] for x in header.values()]
    except OSError as error:
      raise UserError(f"{path}: {error.strerror}.") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
      raise UserError(
        f"{path}: is no safetensors file; give another."
      ) from None
    if size != self._start + max(ends, default=0):
      raise UserError(f"{path}: is not whole; copy it again.")

  @property
  def shapes(self) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor, by name."""
    return {name: shape for name, (_, shape, _) in self._entries.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32.

    Raises:
      UserError: its dtype is neither float32 nor float16 nor bfloat16.
    """
    dtype, shape, offset = self._entries[name]
    if dtype not in _DTYPES:
      raise UserError(
        f"{self._path}: its {name} is {dtype}; weights are F32, F16 or BF16."
      )
    stored = np.memmap(
      self._path, _DTYPES[dtype], "r", self._start + offset, shape
    )
    if dtype == "BF16":  # the upper half of a float32
      return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)
