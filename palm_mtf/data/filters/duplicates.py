# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The choice of one document among duplicates of all sources.

Of documents with the same text the first of this order stays: held-out before
training documents, earlier before later sources, greater before smaller
weights. Neither the order of files nor the number of processes matters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

DIGEST_BYTES = 16


class Candidates(NamedTuple):
  """Documents of one source, in its order."""

  digests: np.ndarray  # hashes of inputs and text, [documents, 2], uint64
  weights: np.ndarray  # [documents], float64
  held_out: np.ndarray  # [documents], bool


def repeats(sources: Sequence[Candidates]) -> list[np.ndarray]:
  """Returns whether each document repeats one that stays, [documents], bool.

  Args:
    sources: documents of each source, in the order of the sources.
  """
  counts = [len(each.weights) for each in sources]
  digests, weights, held_out = map(np.concatenate, zip(*sources, strict=True))
  source = np.repeat(np.arange(len(sources)), counts)
  # By text, and within a text by rank: the first of each text stays.
  order = np.lexsort((-weights, source, ~held_out, *digests.T))
  digests = digests[order]
  is_first = np.ones(len(order), bool)
  is_first[1:] = (digests[1:] != digests[:-1]).any(axis=1)
  removed = np.ones(len(order), bool)
  removed[order[is_first]] = False
  return np.split(removed, np.cumsum(counts)[:-1])
