# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products with constant weights on one device.

Int8 weights have one scale per output channel, as in PaLM's published inference
code; int4 weights have one scale per output channel and group of 32 inputs. For
both, the C++ operations of `native` quantize the activations to int8. Other
operations do not quantize activations, and take the rounded weights as floats.

Rounding multiplies weights by the inverse of their scale, because XLA does so
even for a quotient: a weight near the middle of two numbers would otherwise be
rounded up by one compiler and down by the other.
"""

from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.native import decoding
from palm_mtf.native.decoding import GROUP, NEVER, PackedKernel
from palm_mtf.ops.matmul import has_kernel, is_emulated, packed_matmul
from palm_mtf.ops.xla import in_xla_computation

_LARGEST = 127.0  # largest int8 number
# Scales to try for a group of int4 weights, relative to the scale that clips no
# weight. A smaller scale clips the largest weight, but has smaller rounding
# errors for the other weights.
_INT4_SHARES = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75)


def as_constant(w: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
  """Rounds w to the float type `dtype`, for products by TensorFlow."""
  w = tf.cast(w, dtype)
  # Emulated bfloat16 products are computed in float32, so cast w once, here.
  return tf.cast(w, tf.float32) if is_emulated(w) else w


def find_largest(w: tf.Tensor) -> tf.Tensor:
  """Returns a tensor [1, outer]: max |w| of each column of w [inner, outer].

  w may have more dimensions before these two; the result then has them too.
  """
  return tf.reduce_max(tf.abs(w), -2, keepdims=True)


def round_to_int8(w: tf.Tensor, largest: tf.Tensor) -> tf.Tensor:
  """Returns w, each column rounded to multiples of its scale, `largest` / 127.

  w is a float32 matrix [inner, outer], or some of its rows; `largest` is max
  |w| of each column of the whole matrix, [1, outer].
  """
  largest = tf.where_v2(largest > 0, largest, 1.0)
  return tf.round(w * (_LARGEST / largest)) * (largest / _LARGEST)


def to_int4(w: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
  """Quantizes w [inner, outer]; GROUP numbers of a column share a scale.

  Returns:
    Numbers from -8 to 7, [inner, outer] int8; and the scales, [ceil(inner /
    GROUP), outer] bfloat16.
  """
  inner, outer = w.shape
  w = tf.pad(tf.cast(w, tf.float32), [[0, -inner % GROUP], [0, 0]])
  groups = tf.reshape(w, [-1, GROUP, outer])
  low, high = tf.reduce_min(groups, 1), tf.reduce_max(groups, 1)
  # The number with the largest magnitude becomes -8, because int4 has no +8.
  extreme = tf.where_v2(high > -low, high, low)

  def round_groups(share):
    scale = tf.cast(extreme * share, tf.bfloat16)
    divisor = tf.cast(scale, tf.float32)[:, tf.newaxis]
    divisor = tf.where_v2(divisor == 0, 1.0, divisor)
    numbers = tf.clip_by_value(tf.round(groups * (1.0 / divisor)), -8.0, 7.0)
    error = tf.reduce_sum(tf.square(numbers * divisor - groups), 1)
    return numbers, scale, error

  def keep_better(i, numbers, scale, error):
    other_numbers, other_scale, other_error = round_groups(shares[i])
    is_better = other_error < error
    return (
      i + 1,
      tf.where_v2(is_better[:, tf.newaxis], other_numbers, numbers),
      tf.where_v2(is_better, other_scale, scale),
      tf.minimum(other_error, error),
    )

  shares = tf.constant([share / -8.0 for share in _INT4_SHARES])
  # Try one scale at a time: all six at once would take six times the memory.
  _, numbers, scale, _ = tf.while_loop(
    lambda i, *unused: i < len(_INT4_SHARES),
    keep_better,
    [tf.constant(1), *round_groups(shares[0])],
    parallel_iterations=1,
    back_prop=False,
  )
  return tf.cast(tf.reshape(numbers, [-1, outer])[:inner], tf.int8), scale


def round_to_int4(w: tf.Tensor) -> tf.Tensor:
  """Returns w [inner, outer], float32, rounded to multiples of int4 scales."""
  numbers, scale = to_int4(w)
  scale = tf.repeat(tf.cast(scale, tf.float32), GROUP, 0)
  return tf.cast(numbers, tf.float32) * scale[: w.shape[0]]


def multiply(
  xs: Sequence[tf.Tensor], w: tf.Tensor | PackedKernel, *, is_step: bool
) -> tf.Tensor:
  """Multiplies rows by a kernel; returns [rows, outer], dtype of `xs`.

  Args:
    xs: rows [rows, inner], float dtype: one tensor, or for a PackedKernel also
      several tensors, split along `inner`.
    w: constant weights [inner, outer], on the same device: in the activation
      dtype, or in float32 if bfloat16 is emulated; or packed for C++.
    is_step: whether a decoding step computes the product, which has few rows
      and is computed many times with this kernel.
  """
  dtype = xs[0].dtype
  if isinstance(w, PackedKernel):
    is_long = int(xs[0].shape[0]) >= w.products.onednn
    if not is_step and is_long and can_be_unpacked(w, dtype):
      x = tf.concat(xs, 1) if len(xs) > 1 else xs[0]
      # Wait for `x`, so that only a few kernels are unpacked at a time.
      with tf.control_dependencies([x]):
        return tf.matmul(x, decoding.unpack(w, x.shape[1]))
    return decoding.multiply(xs, w, dtype, is_step=is_step)
  (x,) = xs
  return tf.cast(_multiply_floats(tf.cast(x, w.dtype), w, is_step), dtype)


def can_be_unpacked(w: PackedKernel, dtype: tf.DType) -> bool:
  """Returns whether oneDNN multiplies many rows of `dtype` by a kernel.

  If so, the bits of a product depend on its number of rows.
  """
  return dtype == w.dtype == tf.bfloat16 and w.products.onednn < NEVER


def _multiply_floats(x: tf.Tensor, w: tf.Tensor, is_step: bool) -> tf.Tensor:
  # packed_matmul packs bfloat16 weights once. tf.matmul packs at every call, so
  # a step with one row takes 1.6 times as long (26.6M parameters, Zen 5).
  # Float32 weights stay unpacked: packing takes memory, and saves no time.
  packed = is_step and w.dtype == tf.bfloat16 and not in_xla_computation()
  on_cpu = "gpu" not in x.device.lower()  # oneDNN runs only on CPUs
  if packed and on_cpu and has_kernel("_MklNativeFusedMatMul"):
    return packed_matmul(x, w)
  return tf.matmul(x, w)
