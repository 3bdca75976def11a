# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clipping of all gradients by their global norm (PaLM 5)."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.whole_slice import WholeSlice


def _sum_of_squares(x):
  return 2.0 * tf.nn.l2_loss(tf.cast(x, tf.float32))


def global_norm(gradients: Sequence[mtf.Tensor]) -> mtf.Tensor:
  """Returns the norm of all gradients taken as one vector.

  Args:
    gradients: any shapes and dtypes, on one mesh.

  Returns:
    [], float32. Where a gradient is split, its slices' sums are all-reduced.
  """
  sums = [
    WholeSlice(
      _sum_of_squares,
      [gradient],
      [(mtf.Shape([]), tf.float32)],
      splittable=gradient.shape.dimension_names,
      name="sum_of_squares",
    ).outputs[0]
    for gradient in gradients
  ]
  return mtf.sqrt(mtf.add_n(sums))


def clip_factor(norm: mtf.Tensor, largest: float) -> mtf.Tensor:
  """Returns min(1, largest / norm), [] float32: what gradients multiply by.

  Args:
    norm: [], float32, from `global_norm`.
    largest: GRADIENT_CLIP.
  """
  return mtf.cwise(lambda n: largest / tf.maximum(n, largest), [norm])
