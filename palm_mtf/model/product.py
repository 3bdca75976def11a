# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The matrix product of activations and one kernel, with its gradients."""

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.bfloat16 import matmul
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import WholeSlice


def product(
  x: mtf.Tensor,
  kernel: mtf.Tensor,
  *,
  transpose: bool = False,
  dtype: tf.DType | None = None,
  keeps_kernel: bool = False,
  gradient_dtype: tf.DType | None = None,
) -> mtf.Tensor:
  """Multiplies x by a kernel; sums over split inputs stay open.

  Args:
    x: [batch, length, inputs...], activation dtype.
    kernel: [inputs..., output], dtype of x; [output, inputs] to `transpose`.
    transpose: whether the kernel is multiplied by as its transpose.
    dtype: dtype of the product, that of x or float32; None is that of x.
    keeps_kernel: whether the kernel is kept for the backward pass, and not
      computed again (ops/recompute.py).
    gradient_dtype: dtype in which devices add up the kernel's gradient; None is
      that of x.

  Returns:
    [batch, length, output].
  """
  output = kernel.shape.dims[0 if transpose else -1]

  def matrices(x, kernel):
    x = tf.reshape(x, [x.shape[0] * x.shape[1], -1])
    return x, kernel if transpose else tf.reshape(kernel, [x.shape[1], -1])

  def forward(x, kernel):
    rows, matrix = matrices(x, kernel)
    y = matmul(rows, matrix, transpose_b=transpose, dtype=dtype)
    return tf.reshape(y, [*x.shape[:2], y.shape[1]])

  def backward(x, kernel, dy):
    rows, matrix = matrices(x, kernel)
    dy = tf.cast(tf.reshape(dy, [rows.shape[0], -1]), x.dtype)
    dx = matmul(dy, matrix, transpose_b=not transpose)
    first, second = (dy, rows) if transpose else (rows, dy)
    dkernel = matmul(first, second, transpose_a=True)
    dkernel = tf.reshape(dkernel, kernel.shape)
    return tf.reshape(dx, x.shape), tf.cast(dkernel, gradient_dtype or x.dtype)

  def gradient(op, dy):
    x, kernel = op.inputs
    if not keeps_kernel:
      kernel = recompute(kernel, dy)
    return WholeSlice(
      backward,
      [recompute(x, dy), kernel, dy],
      [(x.shape, x.dtype), (kernel.shape, gradient_dtype or x.dtype)],
      splittable=["batch", "heads", "d_ff", "vocab"],
      name="product_gradient",
    ).outputs

  return WholeSlice(
    forward,
    [x, kernel],
    [(mtf.Shape([*x.shape.dims[:2], output]), dtype or x.dtype)],
    splittable=["batch", "heads", "d_ff", "vocab"],
    gradient=gradient,
    name="product",
  ).outputs[0]
