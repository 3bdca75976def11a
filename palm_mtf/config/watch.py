# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a training run does if something goes wrong, and which batches it skips.

  SKIP_STEPS = [[2, 3]]

  training step   0  1  2  3  4 ...
  reads batch     0  1  4  5  6 ...

A range in SKIP_STEPS is [first batch, last batch], both included. Skipped
batches have numbers too, so that a batch keeps its number if ranges are added.
"""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

from palm_mtf.config.checked import Checked, Count, are_pairs, real
from palm_mtf.config.run import MAX_STEPS, BatchSizes
from palm_mtf.errors import UserError, check_count

if TYPE_CHECKING:  # settings are checked before NumPy is imported
  import numpy as np

  Rows = TypeVar("Rows", int, np.ndarray)


class Skips:
  """Ranges of batches that training skips.

  Attributes:
    ranges: [first batch, last batch] of each range, in ascending order; ranges
      neither touch nor overlap.
  """

  def __init__(self, ranges: Sequence[Sequence[int]] = ()):
    """Raises UserError unless SKIP_STEPS is a list of [first, last] pairs."""
    if not are_pairs(ranges) or not all(0 <= a <= b for a, b in ranges):
      raise UserError(
        f"SKIP_STEPS = {ranges!r}: give pairs of the first and the last batch "
        "to leave out, such as [[1000, 1299]], or [] for none."
      )
    for _, last in ranges:
      check_count("SKIP_STEPS, the last batch of a pair", last, 0, MAX_STEPS)
    self.ranges: list[list[int]] = []
    for first, last in sorted(map(tuple, ranges)):
      # Merge ranges that touch or overlap, because `rows` adds up their sizes.
      if self.ranges and first <= self.ranges[-1][1] + 1:
        self.ranges[-1][1] = max(last, self.ranges[-1][1])
      else:
        self.ranges.append([first, last])

  def and_also(self, ranges: Sequence[Sequence[int]]) -> "Skips":
    """Returns the union of these ranges and `ranges`."""
    return Skips([*self.ranges, *ranges])

  def rows(self, numbers: "Rows", sizes: BatchSizes) -> "Rows":
    """Converts row indices that omit skipped rows to indices that count them.

    Rows are counted instead of batches, so that training reads each row outside
    the ranges once and in order, even if the batch size changes. `numbers` is
    one index, or an array [n], int64.
    """
    for first, last in self.ranges:
      # `numbers`, like `start`, already counts the rows of earlier ranges.
      start = sizes.rows_before(first)
      size = sizes.rows_before(last + 1) - start
      numbers = numbers + size * (numbers >= start)
    return numbers

  def batch_read(self, step: int, sizes: BatchSizes) -> int:
    """Returns the number of the batch that a training step reads.

    If the batch size changes, a step may read rows of two batches; the result
    is the batch of the step's first row.
    """
    first_row = self.rows(sizes.rows_before(step), sizes)
    return sizes.step_of_row(first_row)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchConfig(Checked):
  """What a training run does when something goes wrong.

  Attributes:
    skip_steps: ranges of batches to skip, [first, last] each.
    spike_policy: "off", or "rewind": after a loss spike, training resumes from
      an earlier checkpoint and skips the batches around the spike
      (training/loss_spikes.py).
    spike_skip_steps: number of batches that a rewind skips, 200-500 in PaLM.
    spike_rewinds: maximum number of rewinds; PaLM 540B had about 20 spikes.
    watchdog_secs: if no step ends for so many seconds, the run ends with stack
      traces; the first step and a checkpoint may take ten times as long. None
      turns this watchdog off.
  """

  skip_steps: list[list[int]] | tuple[tuple[int, int], ...] = ()
  spike_policy: Literal["off", "rewind"] = "off"
  spike_skip_steps: Count = 300
  spike_rewinds: Count = 20
  watchdog_secs: Annotated[float | None, real(1.0, 1e9)] = 1800.0

  def __post_init__(self) -> None:
    Skips(self.skip_steps)  # raises UserError for wrong ranges
    super().__post_init__()

  @property
  def skips(self) -> Skips:
    """The ranges of skip_steps."""
    return Skips(self.skip_steps)
