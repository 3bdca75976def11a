# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clipping of all gradients by their global norm (PaLM, section 5)."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused_sum


@fused_sum
def _sum_of_squares(x):
  return tf.square(tf.cast(x, tf.float32))


def sums_of_squares(gradients: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
  """Returns the sum of squares of each gradient, [] float32.

  A finite sum shows that the whole gradient is finite.
  """
  # For a split gradient, the all-reduce sends only one number per device.
  return [
    WholeSlice(
      _sum_of_squares,
      [gradient],
      [(mtf.Shape([]), tf.float32)],
      splittable=gradient.shape.dimension_names,
      name="sum_of_squares",
    ).outputs[0]
    for gradient in gradients
  ]


def global_norm(sums: Sequence[mtf.Tensor]) -> mtf.Tensor:
  """Returns the L2 norm of all gradients, [] float32, from sums of squares."""
  return mtf.sqrt(mtf.add_n(sums))


def all_finite(numbers: Sequence[mtf.Tensor]) -> mtf.Tensor:
  """Returns whether all of `numbers`, [] float32 each, are finite, [] bool."""
  return mtf.cwise(
    lambda *xs: tf.reduce_all(tf.math.is_finite(tf.stack(xs))),
    numbers,
    output_dtype=tf.bool,
  )


def clip_factor(norm: mtf.Tensor, largest: float) -> mtf.Tensor:
  """Returns min(1, largest / norm), [] float32, to multiply gradients by."""
  return mtf.cwise(lambda x: largest / tf.maximum(x, largest), [norm])
