# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The dtypes of GGUF tensors that we write.

q8_0 has a float16 scale for each block of 32 numbers of a row, the largest of
them over 127, and the numbers over the scale as int8.
"""

from typing import NamedTuple

import numpy as np

from palm_mtf.errors import UserError

_BLOCK = 32


class Dtype(NamedTuple):
  """A dtype of GGUF.

  Attributes:
    name: "float32", "float16" or "q8_0".
    number: number in a table of tensors.
    file_type: number of a file that is mostly of this dtype.
  """

  name: str
  number: int
  file_type: int

  def row_bytes(self, columns: int) -> int:
    """Returns the size of a row."""
    if self.name == "q8_0":
      return columns // _BLOCK * (2 + _BLOCK)
    return columns * (4 if self.name == "float32" else 2)

  def can_hold(self, shape: tuple[int, ...]) -> bool:
    """Returns whether llama.cpp reads a tensor of this shape in the dtype."""
    if len(shape) == 1:  # scales of norms
      return self.name == "float32"
    return self.name != "q8_0" or shape[-1] % _BLOCK == 0

  def encode(self, x: np.ndarray, name: str) -> memoryview:
    """Returns the bytes of a tensor.

    Args:
      x: tensor of any shape that the dtype can hold, float32.
      name: name of the tensor, for messages.

    Raises:
      UserError: a number is beyond float16.
    """
    x = np.ascontiguousarray(x, "<f4")
    if self.name == "float32":
      return x.data
    with np.errstate(over="ignore"):
      encoded = x.astype("<f2") if self.name == "float16" else _blocks(x)
    scales = encoded if self.name == "float16" else encoded["scale"]
    if not np.isfinite(scales).all():
      raise UserError(
        f"--dtype = {self.name!r}: numbers of {name} are beyond float16; use "
        "float32."
      )
    return encoded.data.cast("B")


FLOAT32 = Dtype("float32", number=0, file_type=0)
FLOAT16 = Dtype("float16", number=1, file_type=1)
DTYPES = {
  each.name: each
  for each in (FLOAT32, FLOAT16, Dtype("q8_0", number=8, file_type=7))
}


def dtype_of(shape: tuple[int, ...], wanted: Dtype) -> Dtype:
  """Returns the dtype of a tensor in a file that is mostly of one dtype."""
  return next(x for x in (wanted, FLOAT16, FLOAT32) if x.can_hold(shape))


def _blocks(x: np.ndarray) -> np.ndarray:
  x = x.reshape(-1, _BLOCK)
  encoded = np.empty(len(x), [("scale", "<f2"), ("numbers", "i1", _BLOCK)])
  scale = np.abs(x).max(1, keepdims=True) / np.float32(127)
  encoded["scale"] = scale[:, 0]
  # By the float32 scale, and halves away from zero, as llama.cpp does it.
  inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale != 0)
  x = x * inverse
  size = np.floor(np.abs(x))
  encoded["numbers"] = np.copysign(size + (np.abs(x) - size >= 0.5), x)
  return encoded
