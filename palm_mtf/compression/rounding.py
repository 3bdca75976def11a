# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rounds kernels to int8 or int4 by GPTQ (Frantar et al. 2022).

GPTQ rounds one input's weights after another. Each time, it changes the weights
of the inputs that are left, so that the error of the product is smallest. The
result is float weights which decoding rounds to the same numbers and scales:
for this, the largest weight of a scale keeps the largest number, -8 or 127.
"""

from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf.architecture.block import model_of
from palm_mtf.architecture.column_statistics import ColumnStatistics
from palm_mtf.architecture.parameters import layer_name, parse_name
from palm_mtf.config import ModelConfig

GROUP = 32  # inputs that share a scale of int4, as in native/decoding.py
_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)  # as in generation/decode/kernels
_DAMPENING = 0.01  # of the mean of the Hessian's diagonal (section 3.3)


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
  """
  outputs = {
    f"{layer_name(i)}/{part}": [f"{layer_name(i)}/{x}" for x in each.outputs]
    for i, layer in enumerate(model_of(model).layers)
    for each in layer.sums
    for part in each.outputs
  }

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
  h = hessian.astype(np.float64)
  h[np.diag_indices(len(h))] += _DAMPENING * np.trace(h) / len(h) or 1.0
  # Row i of this upper factor of the inverse is what equations 2 and 3 take
  # from the inverse of the Hessian of the inputs from i on.
  factor = np.linalg.cholesky(np.linalg.inv(h)).T
  largest = np.abs(w).max(0) if largest is None else largest
  is_largest = np.abs(w) == largest  # these numbers of int8 are 127 or -127
  scales, least, most = np.where(largest > 0, largest, 1.0) / 127, -127, 127
  w, rounded = w.astype(np.float64), np.empty(w.shape, np.float32)
  for start in range(0, len(w), GROUP):
    end = min(start + GROUP, len(w))
    forced = np.sign(w[start:end]) * 127
    own, errors = is_largest[start:end], np.empty([end - start, w.shape[1]])
    if dtype == "int4":
      scales, own = _find_int4_scales(w[start:end])
      forced, least, most = np.full(own.shape, -8), -8, 7
    for i in range(start, end):
      numbers = np.clip(np.round(w[i] / scales), least, most)
      numbers = np.where(own[i - start], forced[i - start], numbers)
      rounded[i] = numbers * scales
      errors[i - start] = (w[i] - rounded[i]) / factor[i, i]
      w[i:end] -= np.outer(factor[i, i:end], errors[i - start])
    w[end:] -= factor[start:end, end:].T @ errors
  return rounded


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
    scale[scale == 0] = 1.0
    errors = np.clip(np.round(w / scale), -8, 7) * scale - w
    found.append((scale, np.square(errors).sum(0)))
  scales, errors = (np.stack(x) for x in zip(*found, strict=True))
  best = errors.argmin(0)[np.newaxis]
  return np.take_along_axis(scales, best, 0)[0], is_extreme
