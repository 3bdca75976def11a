# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Training rows of PACKING "joined": cut from the stream of all documents.

PaLM's examples are shuffled and mixed, then joined and cut (PaLM 5): neighbours
in a row come from anywhere. Rows that begin in one block of the stream
(document_stream.py) are shuffled too: the hundred rows of a book are not one
batch.
"""

from collections.abc import Sequence

import numpy as np

from palm_mtf.data.batches.document_stream import (
  DocumentStream,
  Stretch,
  TokenSource,
)
from palm_mtf.data.batches.packing import Row, joined_features, joined_row
from palm_mtf.data.batches.row_stream import Piece
from palm_mtf.data.batches.shuffle import shuffle


class JoinedStream:
  """A RowStream of documents that are shuffled, mixed, joined and cut."""

  def __init__(
    self,
    sources: Sequence[TokenSource],
    length: int,
    *,
    eod_id: int | None,
    seed: int,
  ):
    """Readies rows of `length` tokens.

    Args:
      sources: documents, mixed by their rates.
      length: tokens in a row.
      eod_id: id of [eod], if it ends segments; otherwise None.
      seed: seed of every shuffle.
    """
    self._sources = sources
    self._length = length
    self._eod_id = eod_id
    self._seed = seed
    self._stream = DocumentStream(sources, seed=seed)
    tokens = [source.tokens for source in sources]
    self.num_rows = sum(map(len, tokens)) // length
    self.features = joined_features(tokens, eod_id)

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns the features of rows; see `RowStream.read`."""
    return list(map(self._read, self._stretches(numbers)))

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns the documents of rows; see `RowStream.pieces`."""
    return [
      [
        Piece(
          source=self._sources[x.source].name,
          epoch=x.epoch,
          document=x.document,
          begin=x.begin,
          tokens=x.length,
        )
        for x in row
      ]
      for row in self._stretches(numbers)
    ]

  def _read(self, row: list[Stretch]) -> Row:
    # The disk is read here, once for each document of the row.
    parts = [
      self._sources[x.source].tokens.read(x.start, x.start + x.length)
      for x in row
    ]
    targets, is_target = map(np.concatenate, zip(*parts, strict=True))
    return joined_row(targets, is_target, self.features, self._eod_id)

  def _stretches(self, numbers: np.ndarray) -> list[list[Stretch]]:
    begins = self._shuffled(numbers) * self._length
    return [
      self._stream.stretches(begin, begin + self._length)
      for begin in begins.tolist()
    ]

  def _shuffled(self, numbers: np.ndarray) -> np.ndarray:
    """Returns the places of rows in the stream, counted in rows."""
    places = np.empty_like(numbers)
    left = np.arange(len(numbers))
    while len(left):
      block = self._stream.block_at(int(numbers[left[0]]) * self._length)
      # Rows that begin in the block; the last one may end in the next.
      first, stop = (
        -(-self._stream.start_of(x) // self._length) for x in (block, block + 1)
      )
      inside = (numbers[left] >= first) & (numbers[left] < stop)
      mine, left = left[inside], left[~inside]
      key = f"seed {self._seed} rows of block {block}"
      places[mine] = first + shuffle(numbers[mine] - first, stop - first, key)
    return places
