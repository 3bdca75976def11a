# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which source each row of a run comes from, by the rates of the sources.

Rows come in blocks of 10,000. Every block holds each source as often as its
rate says, exactly, in an order of its own, so that the rates hold from the
first block on and every row is found at once, with nothing replayed:

  rates 0.5, 0.3, 0.2 and blocks of 10    a a a a a b b b c c, shuffled
  number                0 1 2 3 4 5 6 7 8 9 | 10 11 ...
  source                b a c a a b a a c b |  a  c ...
  row of that source    0 0 0 1 2 1 3 4 1 2 |  5  2 ...

A source's rows come in their order, so that it begins an epoch only after the
one before, and the first rows of a mixture are the first rows of its sources.
"""

import functools
from collections.abc import Sequence

import numpy as np

from palm_mtf.data.batches.shuffle import permute

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
    self._seed = seed
    # Steps that follow one another read the same block.
    self._block = functools.lru_cache(maxsize=2)(self._order)

  def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each row, and which of that source's rows it is.

    Args:
      numbers: numbers of rows, counted from the start of the run, [n], int64.

    Returns:
      Two arrays [n], int64; a source's rows are each met once, from 0 on.
    """
    if len(self.rows_of_block) == 1:
      return np.zeros_like(numbers), numbers
    blocks, places = np.divmod(numbers, BLOCK_ROWS)
    sources, index = np.empty_like(places), np.empty_like(places)
    for block in np.unique(blocks).tolist():
      inside = blocks == block
      order, ranks = self._block(block)
      sources[inside] = order[places[inside]]
      index[inside] = ranks[places[inside]]
    return sources, blocks * self.rows_of_block[sources] + index

  def _order(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row's source, and how many of it the block has before."""
    ends = np.cumsum(self.rows_of_block)
    key = f"seed {self._seed} mixture block {block}"
    cards = permute(np.arange(BLOCK_ROWS), BLOCK_ROWS, key)
    sources = np.searchsorted(ends, cards, side="right")
    ranks = np.empty_like(sources)
    for source, count in enumerate(self.rows_of_block):
      ranks[sources == source] = np.arange(count)
    return sources, ranks


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
