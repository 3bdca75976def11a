# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products with constant weights, in float or integers.

  float weights   y = x w
  int8 weights    y = s_x round(x / s_x) round(w / s_w) s_w

with a scale s_w for each output channel, as in PaLM's published inference code,
and a scale s_x for each row of x. Int4 weights have a scale for each 32 inner
indices of a channel.
"""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.native import decoding
from palm_mtf.native.decoding import GROUP, PackedKernel
from palm_mtf.ops.matmul import (
  has_kernel,
  int8_matmul,
  is_emulated,
  packed_matmul,
)

_LARGEST = 127.0
# Of the scale of a group of 4-bit numbers at which none is cut off: less of it
# cuts the largest off, and rounds the others less.
_INT4_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)

# [rows, columns] of a float dtype; or, around an int8 product, two tensors:
# numbers, int8 before it and float32 behind it, and scale [rows, 1], float32.
Rows = tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A constant weight on one device."""

  # [inner, outer], activation dtype or int8; float32 where bfloat16 is emulated
  value: tf.Tensor | None
  # Of int8, the values of -127 and 127 in each column, [outer] float32 each.
  limit: tuple[tf.Tensor, tf.Tensor] | None
  initialize: tf.Operation
  packed: PackedKernel | None = None  # in place of both


def constant_variable(value: tf.Tensor, name: str) -> tf.Variable:
  """Makes a variable that keeps its first value."""
  return tf.Variable(value, trainable=False, use_resource=True, name=name)


def make_packed_kernel(packed: PackedKernel, name: str) -> Kernel:
  """Makes the variable of a kernel for the operations of `native`.

  Args:
    packed: first value.
    name: name of the variable.
  """
  kept = constant_variable(packed.panels, name)
  packed = dataclasses.replace(packed, panels=kept.value())
  return Kernel(None, None, kept.initializer, packed)


def make_kernel(
  w: tf.Tensor, dtype: tf.DType, name: str, largest: tf.Tensor | None = None
) -> Kernel:
  """Makes the variables of a kernel.

  Args:
    w: first value, [inner, outer], float32.
    dtype: int8, or a float dtype.
    name: name of the variable.
    largest: for int8, max |w| of each column over all kernels whose products
      are summed, [1, outer] float32; None if it is w alone.
  """
  if dtype != tf.int8:
    numbers = tf.cast(w, dtype)
    # Cast once here, not at each product (ops/matmul.py).
    if is_emulated(numbers):
      numbers = tf.cast(numbers, tf.float32)
    kept = constant_variable(numbers, name)
    return Kernel(kept.value(), None, kept.initializer)
  numbers, scale = to_int8(
    w, largest_numbers(w, 0) if largest is None else largest
  )
  kept = constant_variable(numbers, name)
  high = constant_variable(_LARGEST * scale[0], f"{name}_limit")
  return Kernel(
    kept.value(),
    (-high.value(), high.value()),
    tf.group(kept.initializer, high.initializer),
  )


def value_of(rows: Rows, dtype: tf.DType) -> tf.Tensor:
  """Returns rows as one tensor of a float dtype."""
  return tf.cast(rows[0] * rows[1], dtype) if len(rows) == 2 else rows[0]


def largest_numbers(x: tf.Tensor, axis: int) -> tf.Tensor:
  """Returns max |x| of [rows, columns] along `axis`, which stays, float32."""
  return tf.reduce_max(tf.abs(tf.cast(x, tf.float32)), axis, keepdims=True)


def to_int8(x: tf.Tensor, largest: tf.Tensor) -> Rows:
  """Quantizes x [rows, columns] with scale = largest / 127.

  Args:
    x: any float dtype.
    largest: max |x| of each row or column, from `largest_numbers`.
  """
  scale = tf.where_v2(largest > 0, largest, 1.0) / _LARGEST
  return tf.cast(tf.round(tf.cast(x, tf.float32) / scale), tf.int8), scale


def to_int4(w: tf.Tensor) -> Rows:
  """Quantizes w [inner, outer] to numbers from -8 to 7, int8.

  Their scales are [inner / GROUP, rounded up; outer], bfloat16.
  """
  inner, outer = w.shape
  w = tf.pad(tf.cast(w, tf.float32), [[0, -inner % GROUP], [0, 0]])
  groups = tf.reshape(w, [-1, GROUP, outer])
  low, high = tf.reduce_min(groups, 1), tf.reduce_max(groups, 1)
  # The number that is largest becomes -8: it is the one that is there once.
  extreme = tf.where_v2(high > -low, high, low)

  def rounded(share):
    """Returns numbers, their scales, and what is lost of each group."""
    scale = tf.cast(extreme * share, tf.bfloat16)
    divisor = tf.cast(scale, tf.float32)[:, tf.newaxis]
    divisor = tf.where_v2(divisor == 0, 1.0, divisor)
    numbers = tf.clip_by_value(tf.round(groups / divisor), -8.0, 7.0)
    error = tf.reduce_sum(tf.square(numbers * divisor - groups), 1)
    return numbers, scale, error

  def better(i, numbers, scale, error):
    other_numbers, other_scale, other_error = rounded(shares[i])
    is_better = other_error < error
    return (
      i + 1,
      tf.where_v2(is_better[:, tf.newaxis], other_numbers, numbers),
      tf.where_v2(is_better, other_scale, scale),
      tf.minimum(other_error, error),
    )

  shares = tf.constant([share / -8.0 for share in _INT4_SHARES])
  # One by one: all at once would take six times the memory.
  _, numbers, scale, _ = tf.while_loop(
    lambda i, *unused: i < len(_INT4_SHARES),
    better,
    [tf.constant(1), *rounded(shares[0])],
    parallel_iterations=1,
    back_prop=False,
  )
  return tf.cast(tf.reshape(numbers, [-1, outer])[:inner], tf.int8), scale


def rounded_to_int4(w: tf.Tensor) -> tf.Tensor:
  """Returns w [inner, outer], float32, as `to_int4` rounds it."""
  numbers, scale = to_int4(w)
  scale = tf.repeat(tf.cast(scale, tf.float32), GROUP, 0)
  return tf.cast(numbers, tf.float32) * scale[: w.shape[0]]


def product(x: Rows, kernel: Kernel, *, packed: bool) -> Rows:
  """Multiplies rows by a kernel on the same device.

  Args:
    x: [rows, inner], activation dtype; quantized for an int8 kernel, and in
      parts of some columns each for a packed one.
    kernel: [inner, outer].
    packed: whether oneDNN keeps a packed copy of the kernel, for many products.
  """
  if kernel.packed:
    return (decoding.product(x, kernel.packed, x[0].dtype),)
  # Int8 sums are exact, and no row's result depends on another row.
  w, (numbers, *scale) = kernel.value, x
  if w.dtype != tf.int8:
    y = _float_product(tf.cast(numbers, w.dtype), w, packed)
    return (tf.cast(y, numbers.dtype),)
  if _has("_QuantizedMatMul", numbers):
    y = int8_matmul(numbers, w, kernel.limit, packed=packed)
  else:
    y = tf.matmul(*(tf.cast(each, tf.float32) for each in (numbers, w)))
    y *= kernel.limit[1] / _LARGEST
  return (y, *scale)


def _float_product(x: tf.Tensor, w: tf.Tensor, packed: bool) -> tf.Tensor:
  # A step reads every weight for a handful of multiplications: what counts is
  # that the bytes come in one stream, as oneDNN packs them. One float32 row is
  # the one product that is as fast without.
  packed = packed and (w.dtype != tf.float32 or x.shape[0] > 1)
  if packed and _has("_MklNativeFusedMatMul", x):
    return packed_matmul(x, w)
  return tf.matmul(x, w)


def _has(operation: str, x: tf.Tensor) -> bool:
  # oneDNN runs on CPUs alone.
  return "gpu" not in x.device.lower() and has_kernel(operation)
