# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clipping of all gradients by their global norm (PaLM 5)."""

import math
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import in_tpu_computation


def _sum_of_squares(x):
  return 2.0 * tf.nn.l2_loss(tf.cast(x, tf.float32))


def sums_of_squares(gradients: Sequence[mtf.Tensor]) -> list[mtf.Tensor]:
  """Returns the sum of squares of each gradient, [] float32.

  Where a gradient is split, its slices' sums are all-reduced. A sum is a finite
  number only if the whole gradient is.

  Args:
    gradients: any shapes and dtypes, on one mesh.
  """
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
  """Returns the norm of all gradients taken as one vector, [] float32.

  Args:
    sums: results of `sums_of_squares`.
  """
  return mtf.sqrt(mtf.add_n(sums))


def clip_factor(
  norm: mtf.Tensor, largest: float, losses: Sequence[mtf.Tensor]
) -> mtf.Tensor:
  """Returns min(1, largest / norm), [] float32: what gradients multiply by.

  Where the norm or a loss is infinite or no number, it raises
  InvalidArgumentError when it runs. Everything that an update assigns is
  computed with this factor, so that such a step changes nothing. A program of
  XLA cannot raise: there it is no number, and TpuPlacement assigns nothing.

  Args:
    norm: [], float32, from `global_norm`.
    largest: GRADIENT_CLIP.
    losses: [], float32 each: of the step.
  """

  def factor(*numbers):
    numbers = tf.stack(numbers)
    if in_tpu_computation():
      is_finite = tf.reduce_all(tf.math.is_finite(numbers))
      factor = largest / tf.maximum(numbers[0], largest)
      return tf.where_v2(is_finite, factor, math.nan)
    finite = tf.debugging.check_numerics(numbers, "the step")
    return largest / tf.maximum(finite[0], largest)

  return mtf.cwise(factor, [norm, *losses])
