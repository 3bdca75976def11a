# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products with constant weights on one device, in float or integers.

  float weights   y = x w
  int8 weights    y = s_x round(x / s_x) round(w / s_w) s_w

with a scale s_w for each output channel, as in PaLM's published inference code,
and a scale s_x for each row of x. Int4 weights have a scale for each 32 inner
indices of a channel.
"""

import dataclasses
import functools

from palm_mtf._tf import tf
from palm_mtf.generation.decode.rows import make_variable
from palm_mtf.model.projection import read_product
from palm_mtf.native import decoding
from palm_mtf.native.decoding import GROUP, PackedKernel
from palm_mtf.ops.matmul import (
  has_kernel,
  int8_matmul,
  is_emulated,
  packed_matmul,
)
from palm_mtf.ops.xla import fused

_LARGEST = 127.0
# Scales to try for a group of 4-bit numbers, as shares of the scale at which no
# number is clipped: a smaller scale clips the largest number, and rounds the
# other numbers less.
_INT4_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)

# [rows, columns] of a float dtype; or, around an int8 product, two tensors: the
# numbers, int8 before the product and float32 after it, and their scale [rows,
# 1], float32.
Rows = tuple[tf.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Kernel:
  """A constant weight on one device."""

  # [inner, outer], activation dtype or int8; float32 where bfloat16 is emulated
  value: tf.Tensor | None
  # Of int8: the values of -127 and 127 in each column, [outer] float32 each.
  limit: tuple[tf.Tensor, tf.Tensor] | None
  initialize: tf.Operation
  packed: PackedKernel | None = None  # instead of value and limit


def make_packed_kernel(packed: PackedKernel, name: str) -> Kernel:
  """Makes the variable of a kernel for the operations of `native`."""
  kept = make_variable(packed.panels, name)
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
      are summed, [1, outer] float32; None if there is no other kernel.
  """
  if dtype != tf.int8:
    numbers = tf.cast(w, dtype)
    # Cast once here, not at each product (ops/matmul.py).
    if is_emulated(numbers):
      numbers = tf.cast(numbers, tf.float32)
    kept = make_variable(numbers, name)
    return Kernel(kept.value(), None, kept.initializer)
  numbers, scale = to_int8(
    w, largest_numbers(w, 0) if largest is None else largest
  )
  kept = make_variable(numbers, name)
  high = make_variable(_LARGEST * scale[0], f"{name}_limit")
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
  # The largest number becomes -8, which has no positive counterpart.
  extreme = tf.where_v2(high > -low, high, low)

  def rounded(share):
    """Returns numbers, their scales, and each group's squared error."""
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
  # One after the other: all scales at once would take six times the memory.
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


@fused
def read_inputs(wide, rows, shapes, dtype, angles, is_gated):
  """Reads `Rows` of a joined kernel as `read_product` does."""
  return read_product(value_of(wide, dtype), rows, shapes, angles, is_gated)


def _largest_of_rows(xs):
  return functools.reduce(tf.maximum, [largest_numbers(x, 1) for x in xs])


@fused
def largest_of_rows(*xs):
  """Returns max |x| of each row over all parts, [rows, 1], float32."""
  return _largest_of_rows(xs)


@fused
def quantize(xs, largest):
  """Quantizes parts [rows, columns] as one, with a scale for each row.

  `largest` are max |x| of slices of each row, [rows, 1] each, which share a
  scale; [] if the parts are the whole row.
  """
  largest = functools.reduce(tf.maximum, largest or [_largest_of_rows(xs)])
  # Joined after the rounding, because int8 is a quarter of the bytes.
  numbers, scales = zip(*(to_int8(x, largest) for x in xs), strict=True)
  return tf.concat(numbers, 1), scales[0]


@fused
def dequantize(numbers, scale, dtype):
  """Returns quantized rows as one tensor of a float dtype."""
  return value_of((numbers, scale), dtype)


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
  # A step reads every weight for a handful of multiplications: reading takes
  # the time, and oneDNN packs the weights into one stream of bytes. Only a
  # product of one float32 row is as fast without packing.
  packed = packed and (w.dtype != tf.float32 or x.shape[0] > 1)
  if packed and _has("_MklNativeFusedMatMul", x):
    return packed_matmul(x, w)
  return tf.matmul(x, w)


def _has(operation: str, x: tf.Tensor) -> bool:
  # oneDNN runs only on CPUs.
  return "gpu" not in x.device.lower() and has_kernel(operation)
