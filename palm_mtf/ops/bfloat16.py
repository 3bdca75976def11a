# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products of bfloat16 numbers, on CPUs that lack them too."""

from palm_mtf._tf import gen_xla_ops, tf, xla_data_pb2
from palm_mtf.machine.cpu import bfloat16_flags
from palm_mtf.ops.xla import fused, in_xla_computation

# A CPU that cannot multiply bfloat16 gets the same numbers from float32:
# products of bfloat16 numbers are exact there, sums are in float32 as
# everywhere, and the result is rounded once. TensorFlow's own products are slow
# on such a CPU, and oneDNN's do not exist.


def is_emulated(x: tf.Tensor) -> bool:
  """Returns whether the device of `x` computes products of it in float32."""
  # XLA knows what its device multiplies.
  if x.dtype != tf.bfloat16 or in_xla_computation():
    return False
  return "gpu" not in x.device.lower() and not bfloat16_flags()


def einsum(equation: str, *xs: tf.Tensor) -> tf.Tensor:
  """Multiplies tensors of one float dtype by an einsum equation."""
  if not is_emulated(xs[0]):
    return tf.einsum(equation, *xs)
  y = tf.einsum(equation, *(tf.cast(x, tf.float32) for x in xs))
  return tf.cast(y, tf.bfloat16)


def matmul(
  x: tf.Tensor,
  y: tf.Tensor,
  *,
  transpose_a: bool = False,
  transpose_b: bool = False,
  dtype: tf.DType | None = None,
) -> tf.Tensor:
  """Multiplies matrices of one float dtype.

  Args:
    x: [rows, inner], or [inner, rows] to transpose.
    y: [inner, columns], or [columns, inner] to transpose.
    transpose_a: whether x is transposed.
    transpose_b: whether y is transposed.
    dtype: dtype of the product, float32 for sums that are not rounded; None is
      that of x.
  """
  dtype = dtype or x.dtype
  emulated = is_emulated(x)
  if dtype != x.dtype and not emulated:
    # XLA alone has a product whose result has another dtype.
    return _xla_matmul(x, y, transpose_a, transpose_b, dtype)
  if emulated:
    x, y = (tf.cast(each, tf.float32) for each in (x, y))
  y = tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b)
  return tf.cast(y, dtype)


@fused
def _xla_matmul(x, y, transpose_a, transpose_b, dtype):
  dimensions = xla_data_pb2.DotDimensionNumbers(
    lhs_contracting_dimensions=[0 if transpose_a else 1],
    rhs_contracting_dimensions=[1 if transpose_b else 0],
  )
  return gen_xla_ops.xla_dot_v2(
    x,
    y,
    dimension_numbers=dimensions.SerializeToString(),
    precision_config=b"",
    preferred_element_type=dtype,
  )
