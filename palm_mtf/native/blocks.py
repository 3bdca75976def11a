# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes weights to the block types of GGUF files, in C++ (blocks.h)."""

import ctypes
from typing import NamedTuple

import numpy as np

from palm_mtf.machine.processors import usable_cores


class BlockType(NamedTuple):
  """How many weights share scales."""

  size: int  # weights per block, which share float16 scales
  group: int  # weights per group, which share a whole number


# In the order of `kBlockTypes` in blocks.h.
BLOCK_TYPES = {
  "q4_k": BlockType(256, 32),
  "q5_k": BlockType(256, 32),
  "q6_k": BlockType(256, 16),
  "q5_0": BlockType(32, 32),
  "q5_1": BlockType(32, 32),
}


class Quantized(NamedTuple):
  """Rows of weights: scale * (number - offset) - least.

  The scale of a group is `block_scales` * `scales`, and its least number is
  `block_leasts` * `leasts`. For q6_k and q5_0, the offset is half of the range
  of numbers, and `block_leasts` are 0; for other types, the offset is 0.
  """

  numbers: np.ndarray  # [rows, columns], uint8, from 0
  scales: np.ndarray  # [rows, groups], int8; 1 for q5_0 and q5_1
  leasts: np.ndarray  # [rows, groups], int8; 1 for q5_0 and q5_1
  block_scales: np.ndarray  # [rows, blocks], float16 numbers as float32
  block_leasts: np.ndarray  # [rows, blocks], float16 numbers as float32


class _Pointers(ctypes.Structure):
  _fields_ = [(name, ctypes.c_void_p) for name in Quantized._fields]


def quantize(
  w: np.ndarray, name: str, importance: np.ndarray | None = None
) -> Quantized | None:
  """Quantizes rows of weights; returns None if C++ cannot be compiled.

  Args:
    w: [rows, columns], float32; columns is a multiple of the block's size.
    name: one of BLOCK_TYPES.
    importance: factors of squared errors, [columns]; None for equal ones.
  """
  from palm_mtf.native.operations import library

  functions = library()
  if functions is None:
    return None
  size, group = BLOCK_TYPES[name]
  rows, columns = w.shape
  w = np.ascontiguousarray(w, np.float32)
  found = Quantized(
    np.empty([rows, columns], np.uint8),
    *(np.empty([rows, columns // group], np.int8) for _ in range(2)),
    *(np.empty([rows, columns // size], np.float32) for _ in range(2)),
  )
  factors = None
  if importance is not None:
    factors = np.ascontiguousarray(importance, np.float32)
  functions.palm_quantize(
    ctypes.c_int([*BLOCK_TYPES].index(name)),
    ctypes.c_void_p(w.ctypes.data),
    ctypes.c_int64(rows),
    ctypes.c_int64(columns),
    ctypes.c_void_p(None if factors is None else factors.ctypes.data),
    _Pointers(*(x.ctypes.data for x in found)),
    ctypes.c_int(usable_cores()),
  )
  return found
