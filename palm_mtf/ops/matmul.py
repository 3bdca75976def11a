# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Matrix products, in bfloat16 also on CPUs that cannot multiply bfloat16."""

from palm_mtf._tf import (
  attr_value_pb2,
  gen_xla_ops,
  kernels,
  ops,
  tf,
  xla_data_pb2,
)
from palm_mtf.machine.processors import bfloat16_flags
from palm_mtf.ops.xla import fused, in_xla_computation

# On a CPU that cannot multiply bfloat16, TensorFlow's bfloat16 products are
# slow, so `einsum` and `matmul` compute in float32 and round the result once.
# Other CPUs get the same results, because the product of two bfloat16 values is
# exact in float32, and all CPUs accumulate in float32.


def is_emulated(x: tf.Tensor) -> bool:
  """Returns whether `x` is bfloat16 on a CPU that cannot multiply bfloat16."""
  # Leave operations that XLA compiles as they are; XLA chooses how to multiply.
  if x.dtype != tf.bfloat16 or in_xla_computation():
    return False
  return "gpu" not in x.device.lower() and not bfloat16_flags()


def einsum(equation: str, *xs: tf.Tensor) -> tf.Tensor:
  """Returns the einsum of tensors of one float dtype, in that dtype."""
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
  is_exact: bool = False,
) -> tf.Tensor:
  """Multiplies two matrices of one float dtype; returns [rows, columns].

  With neither `dtype` nor `is_exact`, x and y may also be stacks of matrices.

  Args:
    x: [rows, inner], or [inner, rows] if `transpose_a`.
    y: [inner, columns], or [columns, inner] if `transpose_b`.
    dtype: dtype of the product, float32 or the dtype of x (the default).
    is_exact: whether float32 is multiplied as such also by accelerators, which
      otherwise round it to bfloat16 or TF32 first.
  """
  dtype = dtype or x.dtype
  emulated = is_emulated(x)
  if is_exact and in_xla_computation():
    return _xla_matmul(x, y, transpose_a, transpose_b, dtype, _HIGHEST)
  if dtype != x.dtype and not emulated:
    # Only XLA has a matrix product whose result and inputs differ in dtype.
    return _xla_matmul(x, y, transpose_a, transpose_b, dtype)
  if emulated:
    x, y = (tf.cast(each, tf.float32) for each in (x, y))
  y = tf.matmul(x, y, transpose_a=transpose_a, transpose_b=transpose_b)
  return tf.cast(y, dtype)


_HIGHEST = xla_data_pb2.PrecisionConfig(
  operand_precision=2 * [xla_data_pb2.PrecisionConfig.HIGHEST]
).SerializeToString()


@fused
def _xla_matmul(x, y, transpose_a, transpose_b, dtype, precision=b""):
  dimensions = xla_data_pb2.DotDimensionNumbers(
    lhs_contracting_dimensions=[0 if transpose_a else 1],
    rhs_contracting_dimensions=[1 if transpose_b else 0],
  )
  return gen_xla_ops.xla_dot_v2(
    x,
    y,
    dimension_numbers=dimensions.SerializeToString(),
    precision_config=precision,
    preferred_element_type=dtype,
  )


def has_kernel(name: str) -> bool:
  """Returns whether this build of TensorFlow has kernels of an operation."""
  return bool(kernels.get_registered_kernels_for_op(name).kernel)


def packed_matmul(x: tf.Tensor, w: tf.Tensor) -> tf.Tensor:
  """Multiplies x by constant weights w; returns [rows, outer], dtype of x.

  This oneDNN operation has no public TensorFlow function. Callers check
  that TensorFlow has this operation (`has_kernel`), and that the CPU multiplies
  the dtype (machine/processors.py); otherwise oneDNN ends the process.

  Args:
    x: [rows, inner], bfloat16 or float32.
    w: [inner, outer], dtype of x.
  """
  # The operation packs `w` at its first run, and ignores later changes of `w`.
  value = attr_value_pb2.AttrValue
  operation = ops.get_default_graph()._create_op_internal(
    "_MklNativeFusedMatMul",
    [x, w, tf.zeros([w.shape[1]], x.dtype)],  # the operation requires a bias
    [x.dtype],
    attrs={
      "T": value(type=x.dtype.as_datatype_enum),
      "num_args": value(i=1),
      "is_filter_const": value(b=True),
      "transpose_a": value(b=False),
      "transpose_b": value(b=False),
      "fused_ops": value(list=value.ListValue(s=[b"BiasAdd"])),
      "epsilon": value(f=0.0),
      "leakyrelu_alpha": value(f=0.0),
      "_kernel": value(s=b"MklNameChangeOp"),
    },
    name="packed_matmul",
  )
  (product,) = operation.outputs
  product.set_shape([x.shape[0], w.shape[1]])
  return product
