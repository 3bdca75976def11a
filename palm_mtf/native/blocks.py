# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantizes weights to the block types of GGUF files, in C++ (blocks.h)."""

import ctypes

import numpy as np

from palm_mtf.machine.processors import usable_cores

# {type: weights and bytes per block}, in the order of `kBlockTypes` in blocks.h
BLOCK_TYPES = {
  "q4_k": (256, 144),
  "q5_k": (256, 176),
  "q6_k": (256, 210),
  "q5_0": (32, 22),
  "q5_1": (32, 24),
}


def quantize(
  w: np.ndarray, name: str, importance: np.ndarray | None = None
) -> np.ndarray | None:
  """Quantizes rows of weights; returns None if C++ cannot be compiled.

  Args:
    w: [rows, columns], float32; a row has whole blocks.
    name: one of BLOCK_TYPES.
    importance: factors of squared errors, [columns]; None for equal ones.

  Returns:
    Rows of blocks as llama.cpp has them, [rows, bytes] uint8.
  """
  from palm_mtf.native.operations import library

  functions = library()
  if functions is None:
    return None
  size, num_bytes = BLOCK_TYPES[name]
  rows, columns = w.shape
  w = np.ascontiguousarray(w, np.float32)
  found = np.empty([rows, columns // size * num_bytes], np.uint8)
  factors = None
  if importance is not None:
    # Sums of squares in C++ overflow for large factors, and vanish for small.
    importance = importance / np.mean(importance, dtype=np.float64)
    importance = np.ascontiguousarray(importance, np.float32)
    factors = importance.ctypes.data
  functions.palm_quantize(
    ctypes.c_int([*BLOCK_TYPES].index(name)),
    ctypes.c_void_p(w.ctypes.data),
    *(ctypes.c_int64(x) for x in w.shape),
    ctypes.c_void_p(factors),
    ctypes.c_void_p(found.ctypes.data),
    ctypes.c_int(usable_cores()),
  )
  return found
