# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Norms, in C++, on one CPU device."""

from palm_mtf._tf import tf
from palm_mtf.native.operations import operations, with_shapes


def norm(
  x: tf.Tensor, scale: tf.Tensor, *, is_centered: bool, threads: int
) -> tf.Tensor:
  """Normalizes each row, [rows, d_model].

  Args:
    x: [rows, d_model], float32 or bfloat16.
    scale: [d_model], float32.
    is_centered: whether the mean is subtracted first.
    threads: number of threads.
  """
  y = operations().palm_norm(
    x=x, scale=scale, is_centered=is_centered, threads=threads
  )
  y.set_shape(x.shape)
  return y


def norm_gradient(
  x: tf.Tensor,
  scale: tf.Tensor,
  dy: tf.Tensor,
  *,
  is_centered: bool,
  threads: int,
) -> tuple[tf.Tensor, ...]:
  """Returns the gradients of x and scale; see `norm`."""
  gradients = operations().palm_norm_gradient(
    x=x, scale=scale, dy=dy, is_centered=is_centered, threads=threads
  )
  return tuple(with_shapes(gradients, (x, scale)))
