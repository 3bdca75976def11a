# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batches that a run leaves out: SKIP_STEPS, and those around a loss spike.

  SKIP_STEPS = [[2, 3]]

  training step   0  1  2  3  4 ...
  reads batch     0  1  4  5  6 ...

A range is first and last, both left out, in the numbers that batches have in a
run that leaves out nothing. So what is skipped does not depend on when that was
decided, and the same batch keeps its number after any other range is added.
Rows are mapped one by one: all that is not left out is still read once and in
order when the batch size changes on the way.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from palm_mtf.config.batch_schedule import MAX_STEPS, BatchSizes
from palm_mtf.errors import UserError, check_count

if TYPE_CHECKING:  # settings are checked before NumPy is imported
  import numpy as np

  Rows = TypeVar("Rows", int, np.ndarray)


class Skips:
  """Ranges of batches to leave out.

  Attributes:
    ranges: first and last of each, rising, with at least a batch between two.
  """

  def __init__(self, ranges: Sequence[Sequence[int]] = ()):
    """Checks and keeps SKIP_STEPS.

    Raises:
      UserError: it is not a list of pairs of two steps, the first not after
        the last, or a step is too large.
    """
    if not isinstance(ranges, (list, tuple)) or not all(map(_is_range, ranges)):
      raise UserError(
        f"SKIP_STEPS = {ranges!r}: give pairs of the first and the last batch "
        "to leave out, such as [[1000, 1299]], or [] for none."
      )
    for _, last in ranges:
      check_count("SKIP_STEPS, the last batch of a pair", last, 0, MAX_STEPS)
    self.ranges: list[list[int]] = []
    for first, last in sorted(map(tuple, ranges)):
      # Ranges that touch or overlap become one, so that `rows` adds each once.
      if self.ranges and first <= self.ranges[-1][1] + 1:
        self.ranges[-1][1] = max(last, self.ranges[-1][1])
      else:
        self.ranges.append([first, last])

  def and_also(self, ranges: Sequence[Sequence[int]]) -> "Skips":
    """Returns these and further ranges."""
    return Skips([*self.ranges, *ranges])

  def rows(self, numbers: "Rows", sizes: BatchSizes) -> "Rows":
    """Returns which rows are read, of all, by the rows of training.

    Args:
      numbers: numbers of rows counted through training, from 0: one, or [n],
      int64.
      sizes: the batch size of every step.

    Returns:
      Their numbers with the rows that are left out counted too.
    """
    for first, last in self.ranges:
      # Rows from a range's first on move behind it; ranges rise, so that an
      # earlier shift is already in `numbers`.
      start = sizes.rows_before(first)
      size = sizes.rows_before(last + 1) - start
      numbers = numbers + size * (numbers >= start)
    return numbers

  def batch_read(self, step: int, sizes: BatchSizes) -> int:
    """Returns the batch whose rows training step `step` begins with."""
    first_row = self.rows(sizes.rows_before(step), sizes)
    return sizes.step_of_row(first_row)


def _is_range(value: object) -> bool:
  return (
    isinstance(value, (list, tuple))
    and len(value) == 2
    and all(type(number) is int for number in value)
    and 0 <= value[0] <= value[1]
  )
