# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What reads a joined product, in C++, on one CPU device."""

from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.native.operations import operations


def read_product(
  wide: tf.Tensor,
  sizes: Sequence[int],
  angles: Sequence[tf.Tensor],
  *,
  is_gated: bool,
  threads: int,
) -> list[tf.Tensor]:
  """Splits a product, rotates its q and k, and applies SwiGLU.

  Args:
    wide: product of all rows, [rows, columns], float32 or bfloat16.
    sizes: number of columns of each kernel.
    angles: sin and cos, [length, d_kv / 2] float32 each, by which the first two
      kernels' columns are rotated; () where none are.
    is_gated: whether the last two kernels are wi_gate and wi.
    threads: number of threads.

  Returns:
    [rows, size] of each kernel; of wi_gate and wi together, swish(x wi_gate) *
    (x wi).
  """
  read = sizes[:-1] if is_gated else sizes
  parts = operations().palm_read_product(
    wide=wide,
    angles=list(angles),
    num_parts=len(read),
    sizes=list(sizes),
    is_gated=is_gated,
    threads=threads,
  )
  for part, size in zip(parts, read, strict=True):
    part.set_shape([wide.shape[0], size])
  return parts


def read_product_gradient(
  wide: tf.Tensor,
  gradients: Sequence[tf.Tensor],
  sizes: Sequence[int],
  angles: Sequence[tf.Tensor],
  *,
  is_gated: bool,
  threads: int,
) -> tf.Tensor:
  """Returns the gradient of a product, [rows, columns].

  Args:
    wide: the product.
    gradients: gradient of each result of `read_product`.
    sizes: number of columns of each kernel.
    angles: see `read_product`.
    is_gated: see `read_product`.
    threads: number of threads.
  """
  gradient = operations().palm_read_product_gradient(
    wide=wide,
    gradients=list(gradients),
    angles=list(angles),
    sizes=list(sizes),
    is_gated=is_gated,
    threads=threads,
  )
  gradient.set_shape(wide.shape)
  return gradient
