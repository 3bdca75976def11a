# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The outer update of DiLoCo (Douillard et al. 2023, arXiv:2311.08105).

At a sync, `mean` is the mean of the pods' parameters, which each pod has
trained from the outer parameters p. With learning rate lr and momentum mu:

  delta  =  p - mean                       the outer gradient
  b     <-  mu b + delta
  p     <-  p - lr (delta + mu b)          Nesterov, as in PyTorch's SGD

Pods send either their parameters or, in fewer bits, their own outer gradients
(Streaming DiLoCo, Douillard et al. 2025, arXiv:2501.18512). The functions take
NumPy arrays or TensorFlow's tensors.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_mtf._tf import tf

# Number of adjacent elements of a tensor that share a scale.
GROUP = 256  # as in accounting/memory.py
# Largest magnitude of an element, divided by its scale.
_LARGEST = {"int8": 127.0, "e3m0": 1.0}
# e3m0: a sign and 3 bits of exponent, without mantissa. The smallest code is 0.
_MAGNITUDES = np.array([0.0, *(2.0**x for x in range(-6, 1))], np.float32)
_E3M0 = np.concatenate([_MAGNITUDES, -_MAGNITUDES])
_BOUNDS = (_MAGNITUDES[1:] + _MAGNITUDES[:-1]) / 2  # between adjacent numbers


class _Math(NamedTuple):
  """Functions that NumPy and TensorFlow name differently."""

  cast: Callable[..., Any]
  reshape: Callable[..., Any]
  pad: Callable[..., Any]
  round: Callable[..., Any]  # halves to even numbers
  max: Callable[..., Any]  # of each row, [rows, 1]
  take: Callable[..., Any]
  concat: Callable[..., Any]  # along rows


_ARRAYS = _Math(
  lambda x, dtype: np.asarray(x).astype(dtype.as_numpy_dtype),
  np.reshape,
  np.pad,
  np.rint,
  lambda x: np.max(x, axis=1, keepdims=True),
  np.take,
  lambda x: np.concatenate(x, axis=1),
)
_TENSORS = _Math(
  tf.cast,
  tf.reshape,
  tf.pad,
  tf.round,
  lambda x: tf.reduce_max(x, axis=1, keepdims=True),
  tf.gather,
  lambda x: tf.concat(x, axis=1),
)


def _math_of(x: object) -> _Math:
  return _ARRAYS if isinstance(x, np.ndarray) else _TENSORS


class Sent(NamedTuple):
  """A tensor as it crosses the network."""

  # float32 or bfloat16, in the shape of the tensor; or, [groups, GROUP], int8,
  # or two numbers of 4 bits per uint8, [groups, GROUP / 2].
  codes: Any
  scales: Any = None  # [groups, 1] float32; None for float32 and bfloat16


def outer_step(
  p: Any, momentum: Any, mean: Any, lr: float, mu: float
) -> tuple[Any, Any]:
  """Returns the next outer parameters and momentum, float32, of p's shape."""
  delta = p - mean
  momentum = mu * momentum + delta if mu else delta
  # With lr = 1 use `mean`, because p - delta may be rounded differently.
  p = mean if lr == 1.0 else p - lr * delta
  return p - lr * mu * momentum if mu else p, momentum


def merge(local: Any, outer: Any, alpha: float) -> Any:
  """Returns the parameters with which a pod continues after a sync."""
  return outer if not alpha else outer + alpha * (local - outer)


def encode(p: Any, local: Any, dtype: str) -> Sent:
  """Returns what a pod sends: `local`, or p - local in OUTER_DTYPE `dtype`.

  p is the outer parameter, and `local` the pod's own, float32, of one shape.
  """
  if dtype == "float32":
    return Sent(local)
  math_of, delta = _math_of(p), p - local
  if dtype == "bfloat16":
    return Sent(math_of.cast(delta, tf.bfloat16))
  size = math.prod(int(x) for x in delta.shape)
  padded = math_of.pad(math_of.reshape(delta, [size]), [[0, -size % GROUP]])
  groups = math_of.reshape(padded, [-1, GROUP])
  largest = math_of.max(abs(groups))
  # Add 1 where a group is all 0, because 0 / 0 is not a number.
  largest += math_of.cast(largest <= 0, tf.float32)
  scales = largest / _LARGEST[dtype]
  x = groups / scales
  if dtype == "int8":
    return Sent(math_of.cast(math_of.round(x), tf.int8), scales)
  codes = math_of.cast(x < 0, tf.int32) * len(_MAGNITUDES)
  for bound in _BOUNDS:
    codes += math_of.cast(abs(x) > bound, tf.int32)
  half = GROUP // 2  # a byte has an element of each half of the group
  packed = codes[:, :half] + 16 * codes[:, half:]
  return Sent(math_of.cast(packed, tf.uint8), scales)


def decode(p: Any, sent: Sent, dtype: str) -> Any:
  """Returns a pod's parameters, float32, of p's shape, from its message."""
  if dtype == "float32":
    return sent.codes
  math_of, values = _math_of(p), sent.codes
  if dtype == "e3m0":
    bytes_ = math_of.cast(values, tf.int32)
    codes = math_of.concat([bytes_ % 16, bytes_ // 16])
    values = math_of.take(_E3M0, codes)
  values = math_of.cast(values, tf.float32)
  if dtype != "bfloat16":
    size = math.prod(int(x) for x in p.shape)
    values = math_of.reshape(values * sent.scales, [-1])[:size]
  return p - math_of.reshape(values, p.shape)


def mean_of(parameters: Sequence[Any]) -> Any:
  """Returns the mean over pods, float32; all pods add in the same order."""
  first, *others = parameters
  return sum(others, first) / len(parameters) if others else first
