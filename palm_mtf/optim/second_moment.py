# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The second moment of a gradient g, full or factored, and the update u.

full      v <- beta2 v + (1 - beta2) (g^2 + 1e-30)       u = g / sqrt(v)

factored  r <- beta2 r + (1 - beta2) row_means(g^2 + 1e-30)
          c <- beta2 c + (1 - beta2) column_means(g^2 + 1e-30)
                                                 u = g / sqrt(r c / mean(r))
"""

import math
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.placement import Placement
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.xla import fused
from palm_mtf.optim.optimizer import clip_gradient

# The factored form is Algorithm 4 of Adafactor (Shazeer and Stern 2018), which
# keeps sums of rows and columns. This module keeps means instead, m + n values
# for an m x n matrix; the update u is the same.

GRADIENT_FLOOR = 1e-30  # epsilon_1 of the Adafactor paper; keeps v above 0


def full_update(g, clip, one_minus_beta2, v):
  """Clips g; returns the update u and the next v, with the shape of g."""
  g = clip_gradient(g, clip)
  v += (tf.square(g) + GRADIENT_FLOOR - v) * one_minus_beta2
  return g * tf.math.rsqrt(v), v


def factored_update(g, clip, row, column):
  """Clips g; returns the update u = g * row * column (factors of 1/sqrt(v))."""
  ones = [1] * column.shape.rank
  return clip_gradient(g, clip) * tf.reshape(row, [*row.shape, *ones]) * column


@fused
def _row_and_column_sums(g, clip, rows):
  # Returns the sum of g^2 + 1e-30 in each row and in each column of one slice.
  squares = tf.square(clip_gradient(g, clip)) + GRADIENT_FLOOR
  every = list(range(g.shape.rank))
  return (
    tf.reduce_sum(squares, every[rows:]),
    tf.reduce_sum(squares, every[:rows]),
  )


class FactoredMoment:
  """The factored second moment of a matrix: row and column means."""

  def __init__(
    self,
    mesh_impl: Placement,
    dims: Sequence[mtf.Dimension],
    sizes: Sequence[int],
    rows: int,
  ):
    # `sizes` exclude padding, and so do the means. The first `rows` of `dims`
    # form the row index; the other dimensions form the column index.
    self._mesh_impl = mesh_impl
    self._row_dims, self._column_dims = dims[:rows], dims[rows:]
    self._num_rows = float(math.prod(sizes[:rows]))
    self._num_columns = float(math.prod(sizes[rows:]))

  def next_means(self, g, clip, one_minus_beta2, row, column) -> tuple:
    """Returns row means r and column means c after the step.

    Args:
      g: the gradient, a LaidOutTensor of any float dtype.
      clip: factor by which g is multiplied, [] float32.
      one_minus_beta2: 1 - beta2, [] float32.
      row: r before the step, a LaidOutTensor, float32.
      column: c before the step, a LaidOutTensor, float32.
    """
    sums = self._mesh_impl.slicewise(
      _row_and_column_sums, g, clip, len(self._row_dims)
    )
    means = []
    for old, part, summed, count in zip(
      (row, column),
      sums,
      (self._column_dims, self._row_dims),
      (self._num_columns, self._num_rows),
      strict=True,
    ):
      # Row sums are all-reduced over the mesh axes that split columns, and
      # column sums over the mesh axes that split rows.
      total = self._all_reduce(part, summed)
      means.append(
        self._mesh_impl.slicewise(
          lambda old, total, one_minus_beta2, count=count: (
            old + (total / count - old) * one_minus_beta2
          ),
          old,
          total,
          one_minus_beta2,
        )
      )
    return tuple(means)

  def row_and_column_factors(self, row, column) -> tuple:
    """Returns 1 / sqrt(r / mean(r)) and 1 / sqrt(c) of row and column means.

    The gradient times both factors is the update u before UPDATE_CLIP.
    """
    total = self._mesh_impl.slicewise(tf.reduce_sum, row)
    total = self._all_reduce(total, self._row_dims)
    return (
      self._mesh_impl.slicewise(
        lambda row, total: tf.math.rsqrt(row / (total / self._num_rows)),
        row,
        total,
      ),
      self._mesh_impl.slicewise(tf.math.rsqrt, column),
    )

  def _all_reduce(self, x, dims):
    axes = split_axes(self._mesh_impl, dims)
    return self._mesh_impl.allreduce(x, axes, "SUM")
