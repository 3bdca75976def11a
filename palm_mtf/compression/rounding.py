# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounds kernels to int8 or int4 by GPTQ (Frantar et al. 2022).

The result is float weights, which decoding rounds to the same numbers and
scales: for this, the largest weight of a scale keeps the largest number, -8 for
int4 and 127 or -127 for int8.
"""

from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.architecture.block import model_of
from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.architecture.parameters import layer_name, parse_name
from palm_mtf.compression.replacement import Replace, replace_weights
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError
from palm_mtf.native.decoding import GROUP

_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # as in generation/decode/kernels


def rounding_reader(
  model: ModelConfig,
  read: Callable[[str], np.ndarray],
  statistics: Mapping[str, ColumnStatistics],
  dtype: str,
) -> Callable[[str], np.ndarray]:
  """Returns a reader of parameters whose kernels are rounded.

  Routers and the table of the logits are not rounded.

  Args:
    read: reads a parameter, float32.
    statistics: of all kernels, with Hessians.
    dtype: "int8" or "int4".

  Raises UserError if a scale of int4 would belong to two kernels.
  """
  outputs = {
    f"{layer_name(i)}/{part}": [f"{layer_name(i)}/{x}" for x in each.outputs]
    for i, layer in enumerate(model_of(model).layers)
    for each in layer.sums
    for part in each.outputs
  }
  cut = [
    x
    for names in outputs.values()
    for x in names[:-1]
    if statistics[x].sums.shape[-1] % GROUP
  ]
  if dtype == "int4" and cut:
    raise UserError(
      f"--round = {dtype!r}: inputs of {cut[0]} are no multiple of {GROUP}, so "
      "it shares scales with another kernel; use int8."
    )

  def read_rounded(name: str) -> np.ndarray:
    w, parameter = read(name), parse_name(name)
    if (
      name not in statistics or parameter.is_float32 or not parameter.is_kernel
    ):
      return w
    hessian = statistics[name].hessian
    inputs = hessian.shape[-1]
    if parameter.is_expert:
      pairs = zip(w, hessian, strict=True)
      return np.stack([round_kernel(x, h, dtype) for x, h in pairs])
    matrix, largest = w.reshape(inputs, -1), None
    if dtype == "int8" and name in outputs:
      # Decoding adds up the products of these kernels, which share scales.
      others = (read(x) for x in outputs[name])
      parts = [np.abs(x).reshape(-1, w.shape[-1]).max(0) for x in others]
      largest = np.max(parts, 0)
    return round_kernel(matrix, hessian, dtype, largest).reshape(w.shape)

  return read_rounded


def round_kernel(
  w: np.ndarray,
  hessian: np.ndarray,
  dtype: str,
  largest: np.ndarray | None = None,
) -> np.ndarray:
  """Returns w, [inputs, outputs] float32, rounded by GPTQ.

  Args:
    hessian: sum of x^T x over tokens, [inputs, inputs].
    dtype: "int8" or "int4".
    largest: of int8, the largest magnitude that the scale of each column
      represents, [outputs]; None for that of w.
  """
  largest = np.abs(w).max(0) if largest is None else largest
  # These numbers of int8 are 127 or -127.
  is_largest, forced = np.abs(w) == largest, np.sign(w) * 127
  least, most = (-127, 127) if dtype == "int8" else (-8, 7)

  def choose(group: slice, values: np.ndarray, f: np.ndarray) -> Replace:
    del f
    own, numbers = is_largest[group], forced[group]
    scales = largest.astype(np.float64) / 127
    if dtype == "int4":
      scales, own = _find_int4_scales(values)
      numbers = np.full(own.shape, -8)
    divisors = np.where(scales == 0, 1.0, scales)

    def replace(i: int, weights: np.ndarray) -> np.ndarray:
      rounded = np.clip(np.round(weights / divisors), least, most)
      return np.where(own[i], numbers[i], rounded) * scales

    return replace

  return replace_weights(w, hessian, GROUP, choose)


def _find_int4_scales(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  # Returns the best scale of each column of w, [group, outputs], in bfloat16,
  # and which weight of a column the number -8 stands for.
  is_extreme = np.arange(len(w))[:, np.newaxis] == np.abs(w).argmax(0)
  extreme = w[is_extreme.T.nonzero()[1], np.arange(w.shape[1])]
  found = []
  for share in _SHARES:
    bits = (extreme * share / -8).astype(np.float32).view(np.uint32)
    bits += 0x7FFF + (bits >> 16 & 1)  # to the nearest bfloat16, ties to even
    scale = (bits & 0xFFFF0000).view(np.float32).astype(np.float64)
    numbers = np.round(w / np.where(scale == 0, 1.0, scale))
    errors = np.clip(numbers, -8, 7) * scale - w
    found.append((scale, np.square(errors).sum(0)))
  scales, errors = (np.stack(x) for x in zip(*found, strict=True))
  best = errors.argmin(0)[np.newaxis]
  return np.take_along_axis(scales, best, 0)[0], is_extreme
