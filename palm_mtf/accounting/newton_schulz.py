# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How devices share a Newton-Schulz step X <- a X + (b A + c A^2) X, A = X X^T.

X is a matrix or its transpose, so that A is small: the shorter side of the
matrix is first. Each device has all of the first side, which is gathered if
the layout splits it, and only its part of the second side. So each device
computes a term of A, and an all-reduce adds up the terms.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple


class Shares(NamedTuple):
  """One device's share of the products for a matrix.

  Attributes:
    is_transposed: whether columns are the first side of X.
    first: length of the first side of X.
    second: length of the device's part of the second side.
    gathered: dimensions over whose mesh axes X is gathered.
    summed: dimensions over whose mesh axes the terms of A are added up.
  """

  is_transposed: bool
  first: int
  second: int
  gathered: tuple[int, ...]
  summed: tuple[int, ...]

  def flops(self, steps: int) -> int:
    """Returns the FLOPs of a device in `steps` steps."""
    first, second = self.first, self.second
    return steps * 2 * first * first * (first + 2 * second)


def shares_of(sizes: Sequence[int], parts: Sequence[int], rows: int) -> Shares:
  """Returns how devices share the steps of a matrix.

  Args:
    sizes: sizes of the dimensions; the first `rows` are the rows.
    parts: number of parts into which the layout splits each dimension.
    rows: number of dimensions that are rows.
  """
  every = range(len(sizes))
  sides = tuple(every[:rows]), tuple(every[rows:])

  # Of equal sides, take the one that is split less.
  def order(side: Sequence[int]) -> tuple[int, int]:
    whole = math.prod(sizes[i] for i in side)
    return whole, math.prod(parts[i] for i in side)

  is_transposed = order(sides[1]) < order(sides[0])
  first, second = sides[::-1] if is_transposed else sides
  return Shares(
    is_transposed,
    order(first)[0],
    math.prod(sizes[i] // parts[i] for i in second),
    tuple(i for i in first if parts[i] > 1),
    tuple(i for i in second if parts[i] > 1),
  )
