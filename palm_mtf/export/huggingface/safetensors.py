# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The safetensors format: a JSON header, then the bytes of all tensors.

8 bytes   length of the header, little-endian
header    {name: {"dtype": "F32", "shape": [...], "data_offsets": [a, b]}}
bytes     of each tensor in row-major order, [a, b) from the header's end

The format's own library reads: it checks that the tensors fill the file without
an overlap or a hole, and that each has the size of its dtype and shape. The
library writes only tensors that are all in memory, so that we write.
"""

import json
import math
from collections.abc import Callable, Mapping

import ml_dtypes  # noqa: F401 (the library asks NumPy for "bfloat16")
import numpy as np
from safetensors import SafetensorError, safe_open

from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.json_files import shown
from palm_mtf.model_dir.foreign_files import check_regular

_ALIGNMENT = 8  # of the first tensor, as the format's own library writes it
# The header of a model of 10,000 layers has 10 MB. The library reads up to
# 100 MB, and takes seconds and gigabytes for them.
_MAX_HEADER_BYTES = 20_000_000
_DTYPES = ("F32", "F16", "BF16")


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
  """A safetensors file, mapped into memory.

  Attributes:
    shapes: shape of every tensor, by name.
    dtypes: dtype of every tensor, by name: "F32", "F16", "BF16" or another
      name of the format.
  """

  def __init__(self, path: str):
    """Reads and checks the header.

    Raises:
      UserError: there is no such file, or it is no whole safetensors file.
    """
    self._path = path
    try:
      check_regular(path)
      with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
      if length > _MAX_HEADER_BYTES:
        raise SafetensorError(
          f"a header of {length:,} bytes; it has at most {_MAX_HEADER_BYTES:,}"
        )
      self._file = safe_open(path, framework="np")
    except SafetensorError as error:
      reason = str(error).removeprefix("Error while deserializing header: ")
      raise UserError(
        f"{path}: is no whole safetensors file: {shown(reason)}; copy it again."
      ) from None
    except OSError as error:
      reason = error.strerror or str(error)
      raise UserError(f"{path}: {reason}.") from None
    slices = {name: self._file.get_slice(name) for name in self._file.keys()}
    self.shapes = {name: (*x.get_shape(),) for name, x in slices.items()}
    self.dtypes = {name: x.get_dtype() for name, x in slices.items()}

  def read(self, name: str) -> np.ndarray:
    """Returns a tensor as float32.

    Raises:
      UserError: its dtype is neither float32 nor float16 nor bfloat16, or one
        of its numbers is not finite.
    """
    dtype = self.dtypes[name]
    if dtype not in _DTYPES:
      raise UserError(
        f"{self._path}: its {name} is {dtype}; weights are F32, F16 or BF16."
      )
    value = self._file.get_tensor(name).astype(np.float32, copy=False)
    if not np.isfinite(value).all():
      raise UserError(
        f"{self._path}: its {name} holds a number that is not finite; give a "
        "model without such weights."
      )
    return value
