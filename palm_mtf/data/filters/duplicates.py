# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice of one document among duplicates of all sources.

Of documents with the same text the first of this order stays: held-out before
training documents, earlier before later sources, greater before smaller
weights. Of near duplicates, earlier before later sources, then the lowest hash
of the text. Documents of weight 0 come last in both: nothing is removed for
what is never read. Neither the order of files nor the number of processes
matters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.data.statistics.near_duplicates import group_similar

EXACT_REPEAT, NEAR_REPEAT = 1, 2


class Candidates(NamedTuple):
  """Documents of one source, in its order."""

  digests: np.ndarray  # hashes of inputs and text, [documents, 2], uint64
  # MinHash values, [documents, 128], uint16; [documents, 0] finds none near.
  values: np.ndarray
  weights: np.ndarray  # [documents], float64
  held_out: np.ndarray  # [documents], bool


def find_repeats(sources: Sequence[Candidates]) -> list[np.ndarray]:
  """Returns which documents repeat one that stays.

  Args:
    sources: documents of each source, in the order of the sources.

  Returns:
    An array for each source, [documents], uint8: EXACT_REPEAT, NEAR_REPEAT, or
    0 for a document that stays.
  """
  counts = [len(each.weights) for each in sources]
  digests, values, weights, held_out = map(
    np.concatenate, zip(*sources, strict=True)
  )
  source = np.repeat(np.arange(len(sources)), counts)
  # By text, and within a text by rank: the first of each text stays.
  unread = weights == 0
  order = np.lexsort((-weights, source, ~held_out, unread, *digests.T))
  is_first = _begins_run(digests[order])
  repeats = np.full(len(order), EXACT_REPEAT, np.uint8)
  texts = order[is_first]  # a document of each text, by the hash of the text
  repeats[texts] = 0
  if values.shape[1]:
    # Whether a text is held out does not count: a group would be held out the
    # likelier, the larger it is.
    groups = group_similar(values[texts])
    by_group = np.lexsort(
      (np.arange(len(texts)), source[texts], unread[texts], groups)
    )
    is_later = ~_begins_run(groups[by_group, np.newaxis])
    repeats[texts[by_group[is_later]]] = NEAR_REPEAT
  return np.split(repeats, np.cumsum(counts)[:-1])


def _begins_run(rows: np.ndarray) -> np.ndarray:
  """Returns whether each row differs from the row before, [rows], bool."""
  begins = np.ones(len(rows), bool)
  begins[1:] = (rows[1:] != rows[:-1]).any(axis=1)
  return begins
