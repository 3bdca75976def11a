# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The protocol of all rows of a run, and what a row is made of."""

from typing import NamedTuple, Protocol

import numpy as np

from palm_mtf.data.batches.packing import Row

FEATURES = ("inputs", "targets", "segments", "loss_weights", "prefix")


class Piece(NamedTuple):
  """Tokens of one document in a row."""

  source: str  # name
  epoch: int
  document: int  # place among the documents of its source, as they are read
  begin: int  # tokens of the document before these
  tokens: int


class RowStream(Protocol):
  """The training rows of a run, each a function of its number alone.

  Numbers are counted from the start of the run, [n], int64.
  """

  features: tuple[str, ...]  # of a batch, in the order of FEATURES
  num_rows: int  # of the first epoch, all sources together

  def read(self, numbers: np.ndarray) -> list[Row]:
    """Returns the features of rows: [length], int32; loss_weights float32."""

  def pieces(self, numbers: np.ndarray) -> list[list[Piece]]:
    """Returns the documents of rows, in order."""
