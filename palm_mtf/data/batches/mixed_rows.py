# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows of whole documents, shuffled within each epoch, sources mixed by row.

  number          0 1 2 3 4 | 5 6 7 8 9 | 10 11 ...     one source of 5 rows
  epoch                   0 |         1 |         2
  row             3 0 4 2 1 | 1 4 0 3 2 | ...

mixture.py maps a row's number to a source and a number among the rows of that
source.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.batches.mixture import Mixture
from palm_mtf.data.batches.packing import JoinedRows, Row, WholeRows
from palm_mtf.data.batches.row_stream import FEATURES, Piece
from palm_mtf.data.batches.shuffle import shuffle


class RowSource(NamedTuple):
  """The rows of one source and its share of all rows."""

  name: str
  rate: float
  rows: JoinedRows | WholeRows


class MixedRows:
  """A RowStream of several sources of rows."""

  def __init__(self, sources: Sequence[RowSource], *, seed: int):
    """Mixes sources of WholeRows by their rates."""
    self._sources = sources
    self._seed = seed
    self._mixture = Mixture([source.rate for source in sources], seed=seed)
    self.features = features_of(sources)
    self.num_rows = sum(source.rows.num_rows for source in sources)

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns the features of rows; see `RowStream.read`."""
    return [
      source.rows.read(row, epoch)
      for source, epoch, row in self._places(numbers)
    ]

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns the documents of rows; see `RowStream.pieces`."""
    return [
      [Piece(source.name, epoch, *piece) for piece in source.rows.pieces(row)]
      for source, epoch, row in self._places(numbers)
    ]

  def _places(
    self, numbers: np.ndarray
  ) -> Iterator[tuple[RowSource, int, int]]:
    """Yields source, epoch and row of the source that each row reads."""
    sources, index = self._mixture.locate(numbers)
    places = np.empty([len(numbers), 2], np.int64)
    for s in np.unique(sources):
      mine = sources == s
      places[mine] = self._shuffled(self._sources[s], index[mine])
    for s, (epoch, row) in zip(sources, places.tolist(), strict=True):
      yield self._sources[s], epoch, row

  def _shuffled(self, source: RowSource, numbers: np.ndarray) -> np.ndarray:
    """Returns the epoch of each number, and the row that it reads, [n, 2]."""
    # A step touches one epoch of a source, or two, or many of a tiny source.
    size = source.rows.num_rows
    epochs, places = np.divmod(numbers, size)
    rows = np.empty_like(numbers)
    for epoch in np.unique(epochs).tolist():
      inside = epochs == epoch
      key = f"seed {self._seed} source {source.name} epoch {epoch}"
      rows[inside] = shuffle(places[inside], size, key)
    return np.stack([epochs, rows], axis=1)


def features_of(sources: Sequence[RowSource]) -> tuple[str, ...]:
  """Returns the features of rows, in the order of FEATURES."""
  held = {name for source in sources for name in source.rows.features}
  return tuple(name for name in FEATURES if name in held)
