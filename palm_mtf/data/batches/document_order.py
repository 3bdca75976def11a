# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The shuffled documents of one source, epoch after epoch.

number     0 1 2 3 4 | 5 6 7 ...     five documents
epoch              0 | 1
document   3 0 4 2 1 | 1 4 0 ...
position   0 7 9 ...                 tokens before it, of all epochs
"""

import functools

import numpy as np

from palm_mtf.data.batches.shuffle import shuffle
from palm_mtf.data.tokens.array import TokenArray

_STRIDE = 256
_CHUNK = 1 << 20  # documents at once, in a pass over all; whole strides


class DocumentOrder:
  """The order in which the documents of a source are read, without an end."""

  def __init__(self, tokens: TokenArray, key: str):
    """Readies the order.

    Args:
      tokens: documents of the source, one at least.
      key: name of the shuffles; every epoch has its own.
    """
    self._tokens = tokens
    self._key = key
    self.num_documents = tokens.num_documents
    self.num_tokens = len(tokens)  # of an epoch
    # A block of rows may reach from one epoch into the next.
    self._sparse = functools.lru_cache(maxsize=2)(self._sparse_positions)

  def documents(self, first: int, stop: int) -> np.ndarray:
    """Returns the documents of the numbers `first` to before `stop`, int64."""
    epochs, places = np.divmod(np.arange(first, stop), self.num_documents)
    found = np.empty_like(places)
    for epoch in np.unique(epochs).tolist():
      inside = epochs == epoch
      found[inside] = self._shuffled(places[inside], epoch)
    return found

  def first_from(self, position: int) -> tuple[int, int]:
    """Returns the first document that begins at `position` or behind it.

    Returns:
      Its number, and the position where it begins.
    """
    epoch, rest = divmod(position, self.num_tokens)
    # The stretch of documents that holds the token, then the document in it.
    sparse = self._sparse(epoch)
    stretch = int(np.searchsorted(sparse, rest, side="right")) - 1
    first = stretch * _STRIDE
    places = np.arange(first, min(first + _STRIDE, self.num_documents))
    lengths = self._lengths(places, epoch)
    begins = sparse[stretch] + np.concatenate([[0], np.cumsum(lengths)])
    # Behind the last of a stretch begins the next one, or the next epoch.
    found = int(np.searchsorted(begins, rest, side="left"))
    number = epoch * self.num_documents + first + found
    return number, epoch * self.num_tokens + int(begins[found])

  def _shuffled(self, places: np.ndarray, epoch: int) -> np.ndarray:
    return shuffle(places, self.num_documents, f"{self._key} epoch {epoch}")

  def _lengths(self, places: np.ndarray, epoch: int) -> np.ndarray:
    begins, ends = self._tokens.extents(self._shuffled(places, epoch))
    return ends - begins

  def _sparse_positions(self, epoch: int) -> np.ndarray:
    """Returns the position in its epoch of every 256th document, int64."""
    # The order itself is computed (shuffle.py). Positions are sums over it:
    # kept for every 256th document, 3 MB for 10**8 of them, after one pass over
    # their lengths when an epoch is first read.
    sums = []
    for first in range(0, self.num_documents, _CHUNK):
      places = np.arange(first, min(first + _CHUNK, self.num_documents))
      lengths = self._lengths(places, epoch)
      sums.append(np.add.reduceat(lengths, np.arange(0, len(places), _STRIDE)))
    return np.concatenate([[0], np.cumsum(np.concatenate(sums))[:-1]])
