# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which source each row of a run comes from, by the rates of the sources.

Rows come in blocks of 10,000. Every block holds each source as often as its
rate says, exactly, in an order of its own, so that the rates hold from the
first block on and every row is found at once, with nothing replayed:

  rates 0.5, 0.3, 0.2 and blocks of 10    a a a a a b b b c c, shuffled
  number                0 1 2 3 4 5 6 7 8 9 | 10 11 ...
  source                b a c a a b a a c b |  a  c ...
  row of that source    2 0 1 3 4 0 1 2 0 1 |  6  2 ...
"""

from collections.abc import Sequence

import numpy as np

from palm_mtf.data.permutation import permute

BLOCK_ROWS = 10_000


class Mixture:
  """The sources of all rows of a run.

  Attributes:
    rows_of_block: how many rows of a block come from each source.
  """

  def __init__(self, rates: Sequence[float], *, seed: int):
    """Shares the rows of a block by `rates`, which are positive.

    The largest remainders decide the last rows; a source whose rate is too
    small for a row of its own gets one.
    """
    self.rows_of_block = _apportion(np.asarray(rates, np.float64))
    self._ends = np.cumsum(self.rows_of_block)
    self._seed = seed

  def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each row, and which of that source's rows it is.

    Args:
      numbers: of rows, counted from the start of the run, [n], int64.

    Returns:
      Two arrays [n], int64; a source's rows are each met once, from 0 on, but
      within a block in another order.
    """
    if len(self._ends) == 1:
      return np.zeros_like(numbers), numbers
    block, place = np.divmod(numbers, BLOCK_ROWS)
    card = np.empty_like(place)
    for one_block in np.unique(block):
      inside = block == one_block
      key = f"seed {self._seed} mixture block {one_block}"
      card[inside] = permute(place[inside], BLOCK_ROWS, key)
    source = np.searchsorted(self._ends, card, side="right")
    counts = self.rows_of_block[source]
    return source, block * counts + card - (self._ends[source] - counts)


def _apportion(rates: np.ndarray) -> np.ndarray:
  """Returns whole numbers in proportion to `rates`; they add up to a block."""
  shares = rates / rates.sum() * BLOCK_ROWS
  counts = np.maximum(1, np.floor(shares)).astype(np.int64)
  # Rounded: equal remainders must not be told apart by their last bits.
  order = np.argsort(-np.round(shares - counts, 9), kind="stable")
  missing = BLOCK_ROWS - counts.sum()
  if missing >= 0:
    counts[order[:missing]] += 1
  else:  # many sources of less than a row each
    counts[np.argmax(counts)] += missing
  return counts
