# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes quantized weights as llama.cpp's blocks (its ggml-common.h).

A block has the bytes of one or two float16 scales, of the numbers of groups,
and of the lower and the upper bits of the weights' numbers.
"""

from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.native.blocks import BLOCK_TYPES, Quantized


def pack_blocks(x: Quantized, dtype: str) -> np.ndarray:
  """Returns rows of blocks of a type in BLOCK_TYPES: [rows, bytes] uint8."""
  size, group = BLOCK_TYPES[dtype]
  numbers = x.numbers.reshape(-1, size)
  scales, leasts = (y.reshape(-1, size // group) for y in (x.scales, x.leasts))
  ends = [_float16(y) for y in (x.block_scales, x.block_leasts)]
  parts = _PACKERS[dtype](numbers, scales, leasts, *ends)
  return np.concatenate(parts, 1).reshape(len(x.numbers), -1)


def _float16(x: np.ndarray) -> np.ndarray:
  return x.reshape(-1, 1).astype("<f2").view(np.uint8)


def _pair(numbers: np.ndarray, group: int) -> np.ndarray:
  # Puts the lower 4 bits of two successive groups into each byte.
  x = numbers.reshape(len(numbers), -1, 2, group) & 15
  return (x[:, :, 0] | x[:, :, 1] << 4).reshape(len(numbers), -1)


def _fifth_bits(numbers: np.ndarray) -> np.ndarray:
  # Returns bytes of the numbers' fifth bits, the first in the lowest bit.
  return np.packbits(numbers >> 4, axis=-1, bitorder="little")


def _pack_six_bits(scales: np.ndarray, leasts: np.ndarray) -> np.ndarray:
  # The upper 2 bits of the last 4 numbers are in bytes of the first 4.
  (a, b), (c, d) = (np.split(x.view(np.uint8), 2, 1) for x in (scales, leasts))
  parts = a | b >> 4 << 6, c | d >> 4 << 6, b & 15 | (d & 15) << 4
  return np.concatenate(parts, 1)


def _pack_k(numbers, scales, leasts, d, least):
  return d, least, _pack_six_bits(scales, leasts), _pair(numbers, 32)


def _pack_q5_k(numbers, *others):
  *first, low = _pack_k(numbers, *others)
  # Byte i has the bits of number i of each group.
  high = _fifth_bits(numbers.reshape(-1, 8, 32).transpose(0, 2, 1))
  return *first, high.reshape(len(numbers), -1), low


def _pack_q6_k(numbers, scales, leasts, d, least):
  del leasts, least
  x = numbers.reshape(-1, 2, 4, 32)
  low = x[:, :, :2] & 15 | (x[:, :, 2:] & 15) << 4
  high = sum((x[:, :, i] >> 4) << 2 * i for i in range(4))
  low, high = (y.reshape(len(numbers), -1) for y in (low, high))
  return low, high, scales.view(np.uint8), d


def _pack_q5_0(numbers, scales, leasts, d, least):
  del scales, leasts, least
  return d, _fifth_bits(numbers), _pair(numbers, 16)


def _pack_q5_1(numbers, scales, leasts, d, least):
  del scales, leasts
  # This type adds its least number, which others subtract.
  least = (-least.view("<f2")).view(np.uint8)
  return d, least, _fifth_bits(numbers), _pair(numbers, 16)


_PACKERS: Mapping[str, Callable[..., tuple[np.ndarray, ...]]] = {
  "q4_k": _pack_k,
  "q5_k": _pack_q5_k,
  "q6_k": _pack_q6_k,
  "q5_0": _pack_q5_0,
  "q5_1": _pack_q5_1,
}
