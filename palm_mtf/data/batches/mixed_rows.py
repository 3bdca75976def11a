# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of whole documents: shuffled in each epoch, sources mixed row by row.

Sources are mixed in blocks of 10,000 rows. In every block, each source has its
exact share of rows, and the order of the sources is shuffled:

  rates 0.5, 0.3, 0.2 and blocks of 10    a a a a a b b b c c, shuffled
  number                0 1 2 3 4 5 6 7 8 9 | 10 11 ...
  source                b a c a a b a a c b |  a  c ...
  row of that source    0 0 0 1 2 1 3 4 1 2 |  5  2 ...

The rows of a source are shuffled in each epoch. For a source of 5 rows:

  row of that source    0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...
  epoch                         0 |         1 |         2
  row that is read      3 0 4 2 1 | 1 4 0 3 2 | ...
"""

import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.batches.packing import (
  FEATURES,
  JoinedRows,
  Piece,
  Row,
  WholeRows,
)
from palm_mtf.data.batches.shuffle import shuffle, shuffle_epochs

BLOCK_ROWS = 10_000


class Mixture:
  """Decides from which source each row of a run comes."""

  def __init__(self, rates: Sequence[float], *, seed: int):
    """Divides every BLOCK_ROWS rows among sources in proportion to `rates`."""
    # Number of rows per source in every block, [sources], int64.
    self.rows_of_block = _apportion(np.asarray(rates, np.float64))
    self._seed = seed
    # Cache two blocks, because consecutive steps read the same one or two.
    self._block = functools.lru_cache(maxsize=2)(self._order_block)

  def locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns each row's source, and the row's number within that source.

    Args:
      numbers: numbers of rows, counted from the start of the run, [n], int64.

    Returns:
      Two arrays, [n], int64: the index of the source, and the row's number
      among the rows of the run that come from this source, counted from 0.
    """
    # Every block has the same number of rows per source, so that earlier blocks
    # need not be computed.
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

  def _order_block(self, block: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the source of each row of a block, and the row's rank.

    The rank counts from 0 among the block's rows from the same source.
    """
    ends = np.cumsum(self.rows_of_block)
    key = f"seed {self._seed} mixture block {block}"
    cards = shuffle(np.arange(BLOCK_ROWS), BLOCK_ROWS, key)
    sources = np.searchsorted(ends, cards, side="right")
    ranks = np.empty_like(sources)
    for source, count in enumerate(self.rows_of_block):
      ranks[sources == source] = np.arange(count)
    return sources, ranks


def _apportion(rates: np.ndarray) -> np.ndarray:
  """Divides BLOCK_ROWS in proportion to `rates`; returns rows per source."""
  # This is the largest remainder method, with at least one row per source.
  shares = rates / rates.sum() * BLOCK_ROWS
  counts = np.maximum(1, np.floor(shares)).astype(np.int64)
  # Round, because remainders that should be equal may differ in the last bits.
  order = np.argsort(-np.round(shares - counts, 9), kind="stable")
  missing = BLOCK_ROWS - counts.sum()
  if missing >= 0:
    counts[order[:missing]] += 1
  else:  # shares below 1 took a whole row, so the largest source gives up rows
    counts[np.argmax(counts)] += missing
  return counts


class RowSource(NamedTuple):
  """The rows of one source and its share of all rows."""

  name: str
  rate: float
  rows: JoinedRows | WholeRows


class MixedRows:
  """A RowStream (batches.py) that mixes the WholeRows of several sources."""

  def __init__(self, sources: Sequence[RowSource], *, seed: int):
    """Mixes sources in proportion to their rates."""
    self._sources = sources
    self._seed = seed
    self._mixture = Mixture([source.rate for source in sources], seed=seed)
    self.features = list_features(sources)
    self.num_rows = sum(source.rows.num_rows for source in sources)

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns the features of rows; see `RowStream.read`."""
    return [
      source.rows.read(row, epoch)
      for source, epoch, row in self._places(numbers)
    ]

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns the pieces of documents in rows; see `RowStream.pieces`."""
    return [
      [Piece(source.name, epoch, *piece) for piece in source.rows.pieces(row)]
      for source, epoch, row in self._places(numbers)
    ]

  def _places(
    self, numbers: np.ndarray
  ) -> Iterator[tuple[RowSource, int, int]]:
    """Yields (source, epoch, index of row in source) for each row number."""
    sources, index = self._mixture.locate(numbers)
    epochs, rows = np.empty_like(index), np.empty_like(index)
    for s in np.unique(sources):
      mine, source = sources == s, self._sources[s]
      key = f"seed {self._seed} source {source.name}"
      epochs[mine], rows[mine] = shuffle_epochs(
        index[mine], source.rows.num_rows, key
      )
    for s, epoch, row in zip(
      sources, epochs.tolist(), rows.tolist(), strict=True
    ):
      yield self._sources[s], epoch, row


def list_features(sources: Sequence[RowSource]) -> tuple[str, ...]:
  """Returns the features that any source has, in the order of FEATURES."""
  held = {name for source in sources for name in source.rows.features}
  return tuple(name for name in FEATURES if name in held)
