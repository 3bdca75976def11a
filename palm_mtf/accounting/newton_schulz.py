# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How devices share a Newton-Schulz step X <- a X + (b A + c A^2) X, A = X X^T.

X is a matrix or its transpose, so that A is small: the shorter side of the
matrix is first. Each device has all of the first side, which is gathered if
the layout splits it, and only its part of the second side. So each device
computes a term of A, and an all-reduce adds up the terms. A kernel of experts
stacks one matrix per expert; a device computes only those of its experts.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from palm_mtf.accounting.optimizer_state import row_rank
from palm_mtf.accounting.work import Work
from palm_mtf.architecture.parameters import parameter_dims, parse_name


class Shares(NamedTuple):
  """One device's share of the products for a kernel."""

  # Number of the device's matrices in each dimension before the rows:
  # (experts,), or () for a kernel that is one matrix.
  stack: tuple[int, ...]
  is_transposed: bool  # whether columns are the first side of X
  first: int  # length of the first side of X
  second: int  # length of the device's part of the second side
  gathered: tuple[int, ...]  # dimensions over whose mesh axes X is gathered
  # Dimensions over whose mesh axes the terms of A are added up.
  summed: tuple[int, ...]

  @property
  def count(self) -> int:
    """The number of the device's matrices."""
    return math.prod(self.stack)

  def flops(self, steps: int) -> int:
    """Returns the FLOPs of a device in `steps` steps."""
    first, second = self.first, self.second
    return self.count * steps * 2 * first * first * (first + 2 * second)


def shares_of(
  sizes: Sequence[int], parts: Sequence[int], rows: int, begin: int = 0
) -> Shares:
  """Returns how devices share the steps of a kernel.

  Args:
    sizes: sizes of the dimensions; those from `begin` to `rows` are the rows.
    parts: number of parts into which the layout splits each dimension.
    rows: where the dimensions of the rows end.
    begin: number of dimensions that count matrices, before the rows.
  """
  every = range(len(sizes))
  sides = tuple(every[begin:rows]), tuple(every[rows:])

  # Of equal sides, take the one that is split less.
  def order(side: Sequence[int]) -> tuple[int, int]:
    whole = math.prod(sizes[i] for i in side)
    return whole, math.prod(parts[i] for i in side)

  is_transposed = order(sides[1]) < order(sides[0])
  first, second = sides[::-1] if is_transposed else sides
  return Shares(
    tuple(sizes[i] // parts[i] for i in every[:begin]),
    is_transposed,
    order(first)[0],
    math.prod(sizes[i] // parts[i] for i in second),
    tuple(i for i in first if parts[i] > 1),
    tuple(i for i in second if parts[i] > 1),
  )


class Orthogonalized(NamedTuple):
  """A kernel whose update an optimizer orthogonalizes."""

  shares: Shares
  steps: int  # number of Newton-Schulz steps
  count: int  # number of layers with such a kernel
  # Mesh axis, and numbers that a device has after its all-gather.
  gathers: list[tuple[str | None, int]]
  # Mesh axes over which the terms of A are added up.
  summed: tuple[str | None, ...]


def orthogonalized(work: Work) -> Iterator[Orthogonalized]:
  """Yields the kernels whose updates the optimizer orthogonalizes."""
  mesh, optimizer = work.mesh, work.optimizer
  if not optimizer.newton_schulz_steps(2, is_kernel=True):
    return
  dims_of = parameter_dims(work.model)
  for name, each, count in work.trained_slices:
    is_kernel = parse_name(name).is_kernel
    steps = optimizer.newton_schulz_steps(len(each.sizes), is_kernel)
    if not steps:
      continue
    dims = mesh.stored(dims_of[name])
    parts = [mesh.axis_size_of(x) for x in dims]
    sizes = [x * n for x, n in zip(each.sizes, parts, strict=True)]
    begin = int(parse_name(name).is_expert)
    shares = shares_of(sizes, parts, row_rank(name), begin)
    numbers = each.size
    gathers = []
    for i in shares.gathered:
      numbers *= parts[i]
      gathers.append((mesh.axis_of(dims[i]), numbers))
    summed = tuple(mesh.axis_of(dims[i]) for i in shares.summed)
    yield Orthogonalized(shares, steps, count, gathers, summed)


def device_flops(work: Work) -> int:
  """Returns the FLOPs of a device's Newton-Schulz steps in a training step."""
  return sum(x.count * x.shares.flops(x.steps) for x in orthogonalized(work))


def buffer_bytes(work: Work) -> int:
  """Returns a device's bytes for the products of one layer's kernels.

  A kernel needs X twice, old and new, and A, its square, and their sum.
  """
  return 4 * sum(
    x.shares.count
    * (2 * x.shares.first * x.shares.second + 3 * x.shares.first**2)
    for x in orthogonalized(work)
  )
