# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How many sequences each step has: one number, or PaLM's ramp.

  GLOBAL_BATCH_SIZE = 16
  GLOBAL_BATCH_SIZE = [[0, 512], [50000, 1024], [115000, 2048]]

The second is PaLM 540B (PaLM 5): 512 sequences from step 0 on, 1,024 from step
50,000 on, 2,048 from step 115,000 on. Steps are counted from 0.
"""

import bisect
import itertools
from collections.abc import Sequence

from palm_mtf.errors import UserError, check_count

# Rows of all steps are counted in int64.
MAX_BATCH_SIZE, MAX_STEPS = 2**24, 10**9


class BatchSizes:
  """The batch size of every step.

  Attributes:
    pairs: a step and the size from there on, in order.
    sizes: the sizes, in order.
    largest: the largest batch size.
  """

  def __init__(self, global_batch_size: int | Sequence[Sequence[int]]):
    """Checks and keeps GLOBAL_BATCH_SIZE.

    Raises:
      UserError: it is neither a size nor pairs of a step and a size, the first
        step 0 and each later than the one before, or a number is too large.
    """
    self.pairs = _pairs(global_batch_size)
    self._starts = [start for start, _ in self.pairs]
    self.sizes = [size for _, size in self.pairs]
    self.largest = max(self.sizes)
    self._rows_before = [0]
    for i, size in enumerate(self.sizes[:-1]):
      steps = self._starts[i + 1] - self._starts[i]
      self._rows_before.append(self._rows_before[-1] + steps * size)

  def size(self, step: int) -> int:
    """Returns the sequences of `step`."""
    return self.sizes[self._phase(step)]

  def rows_before(self, step: int) -> int:
    """Returns the sequences of all steps before `step`."""
    i = self._phase(step)
    return self._rows_before[i] + (step - self._starts[i]) * self.sizes[i]

  def step_of_row(self, row: int) -> int:
    """Returns the step that reads sequence `row`, counted through all steps."""
    i = bisect.bisect_right(self._rows_before, row) - 1
    return self._starts[i] + (row - self._rows_before[i]) // self.sizes[i]

  def next_change(self, step: int) -> int | None:
    """Returns the first step after `step` of another size, if there is one."""
    # The loop builds another program there: shapes are static.
    later = self._phase(step) + 1
    return self._starts[later] if later < len(self._starts) else None

  def _phase(self, step: int) -> int:
    return bisect.bisect_right(self._starts, step) - 1


def _pairs(value: object) -> list[list[int]]:
  if isinstance(value, int):
    check_count("GLOBAL_BATCH_SIZE", value, maximum=MAX_BATCH_SIZE)
    return [[0, value]]
  whole = isinstance(value, (list, tuple)) and all(
    isinstance(pair, (list, tuple))
    and len(pair) == 2
    and all(type(number) is int for number in pair)
    for pair in value
  )
  if whole and value:
    starts = [start for start, _ in value]
    rising = all(a < b for a, b in itertools.pairwise(starts))
    if starts[0] == 0 and rising and all(size > 0 for _, size in value):
      for start, size in value:
        check_count("GLOBAL_BATCH_SIZE", size, maximum=MAX_BATCH_SIZE)
        check_count("GLOBAL_BATCH_SIZE, a step of", start, 0, MAX_STEPS)
      return [list(pair) for pair in value]
  raise UserError(
    f"GLOBAL_BATCH_SIZE = {value!r}: give a whole number, or pairs of a step "
    "and the size from there on, the first step 0 and the steps rising, such "
    "as [[0, 512], [50000, 1024]]."
  )
