# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.filters.duplicates import (
  EXACT_REPEAT,
  Candidates,
  find_repeats,
)
from tests.data.small_sources import repeatable

# Documents of a source: (text, weight, whether it is held out).
_documents = st.lists(
  st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.booleans()),
  max_size=8,
)


def candidates(documents) -> Candidates:
  digests = [
    hashlib.blake2b(text.encode(), digest_size=16).digest()
    for text, _, _ in documents
  ]
  return Candidates(
    digests=np.frombuffer(b"".join(digests), np.uint64).reshape(-1, 2),
    values=np.zeros([len(documents), 0], np.uint16),
    weights=np.array([weight for _, weight, _ in documents], np.float64),
    held_out=np.array([held_out for _, _, held_out in documents], bool),
  )


def kept(sources) -> list[list[tuple]]:
  """Returns the documents of each source that stay, sorted."""
  removed = find_repeats([candidates(source) for source in sources])
  assert {code for each in removed for code in each} <= {0, EXACT_REPEAT}
  return [
    sorted(d for d, r in zip(source, mine, strict=True) if not r)
    for source, mine in zip(sources, removed, strict=True)
  ]


def kept_by_hand(sources) -> list[list[tuple]]:
  best = {}
  for number, source in enumerate(sources):
    for text, weight, held_out in source:
      rank = (weight == 0, not held_out, number, -weight)
      best[text] = min(best.get(text, rank), rank)
  found = [[] for _ in sources]
  for text, (_, in_training, number, weight) in best.items():
    found[number].append((text, -weight, not in_training))
  return [sorted(each) for each in found]


@given(st.lists(_documents, min_size=1, max_size=3), st.randoms())
@repeatable(200)
def test_of_equal_texts_the_one_of_the_rule_stays_in_any_order(sources, random):
  expected = kept_by_hand(sources)
  assert kept(sources) == expected
  for source in sources:
    random.shuffle(source)
  assert kept(sources) == expected
