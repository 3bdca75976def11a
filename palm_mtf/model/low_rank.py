# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Products with the two factors of adapted kernels (architecture/adapter.py).

The kernels of one norm share products: x [A_q | A_k | ...], and the product of
that with a matrix that has B_q, B_k and so on along its diagonal. They are not
joined with x [q | k | ...], so that B = 0 changes no bit of the result.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture import adapter
from palm_mtf.architecture.adapter import LowRank
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.slicewise import WholeSlice


@dataclasses.dataclass(frozen=True)
class LowRanks:
  """The factors of some joined kernels, on one device."""

  shapes: Sequence[Sequence[int]]  # of each kernel's slice, without its inputs
  ranks: Sequence[int]  # of each kernel's adapter; 0 for a kernel without one
  scale: float  # the factor of A B

  def down(self, x: tf.Tensor, firsts: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns scale * x [A | ...], [rows, ranks], for x [rows, inputs]."""
    return matmul(x, join_firsts(firsts)) * self.scale

  def up(self, low: tf.Tensor, seconds: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns what to add to x [W | ...], [rows, columns]; see `down`."""
    return matmul(low, self._diagonal(seconds))

  def down_gradient(
    self, gradient: tf.Tensor, seconds: Sequence[tf.Tensor]
  ) -> tf.Tensor:
    """Returns the gradient of x [A | ...], given that of `up`'s result."""
    diagonal = self._diagonal(seconds)
    return matmul(gradient, diagonal, transpose_b=True) * self.scale

  def up_gradients(
    self, low: tf.Tensor, gradient: tf.Tensor
  ) -> list[tf.Tensor]:
    """Returns the gradient of each B, given `down`'s result."""
    whole, found = matmul(low, gradient, transpose_a=True), []
    for row, column, rank, shape in self._blocks():
      width = math.prod(shape)
      block = whole[row : row + rank, column : column + width]
      found.append(tf.reshape(block, [rank, *shape]))
    return found

  def _blocks(self):
    # Yields (first row, first column, rank, shape) of each B on the diagonal.
    row = column = 0
    for rank, shape in zip(self.ranks, self.shapes, strict=True):
      if rank:
        yield row, column, rank, shape
      row, column = row + rank, column + math.prod(shape)

  def _diagonal(self, seconds: Sequence[tf.Tensor]) -> tf.Tensor:
    columns, rows = sum(map(math.prod, self.shapes)), []
    for x, (_, column, rank, shape) in zip(
      seconds, self._blocks(), strict=True
    ):
      width = math.prod(shape)
      sides = [0, 0], [column, columns - column - width]
      rows.append(tf.pad(tf.reshape(x, [rank, width]), sides))
    return tf.concat(rows, 0)


def join_firsts(firsts: Sequence[tf.Tensor]) -> tf.Tensor:
  """Returns [A | ...], [inputs, ranks], of factors [inputs..., rank]."""
  return tf.concat([tf.reshape(x, [-1, x.shape[-1]]) for x in firsts], 1)


def column_factors(
  magnitude: mtf.Tensor,
  kernel: mtf.Tensor,
  first: mtf.Tensor,
  second: mtf.Tensor,
  low_rank: LowRank,
) -> mtf.Tensor:
  """Returns DoRA's m / ||W + s A B||, the factor of each column of a product.

  The norm counts as a constant in the backward pass (Liu et al. 2024, section
  4.3). The magnitude m is [outputs...], float32, and so is the result.
  """
  num_inputs = len(first.shape.dims) - 1

  def sum_squares(w, a, b):
    w, a, b = (tf.cast(x, tf.float32) for x in (w, a, b))
    squares = tf.square(w + low_rank.scale * tf.tensordot(a, b, 1))
    return tf.reduce_sum(squares, list(range(num_inputs)))

  (squares,) = WholeSlice(
    sum_squares,
    [kernel, first, second],
    [(magnitude.shape, tf.float32)],
    splittable=["heads", "d_ff"],
    name="column_squares",
  ).outputs

  divide = functools.partial(adapter.column_factors, tf)

  def gradient(op, dy):
    magnitude, squares = op.inputs
    (dm,) = WholeSlice(
      divide,
      [dy, squares],
      [(magnitude.shape, tf.float32)],
      splittable=["heads", "d_ff"],
      name="magnitude_gradient",
    ).outputs
    return [dm, None]

  return WholeSlice(
    divide,
    [magnitude, squares],
    [(magnitude.shape, tf.float32)],
    splittable=["heads", "d_ff"],
    gradient=gradient,
    name="column_factors",
  ).outputs[0]
