# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hypothesis
import numpy as np
from hypothesis import strategies as st

from palm_mtf.data.batches import document_order
from palm_mtf.data.batches.document_order import DocumentOrder
from palm_mtf.data.tokens.array import TokenArray
from tests.data.small_sources import numbered, repeatable

_LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


def lengths_of(tokens: TokenArray, documents: np.ndarray) -> np.ndarray:
  begins, ends = tokens.extents(documents)
  return ends - begins


@hypothesis.given(_LENGTHS, st.integers(0, 3), st.data())
@repeatable(60)
def test_a_position_is_found_as_by_adding_up_all_lengths_before(
  lengths, epoch, data
):
  tokens = numbered(lengths)
  order = DocumentOrder(tokens, "key")
  documents = order.documents(0, (epoch + 2) * len(lengths))
  begins = np.cumsum([0, *lengths_of(tokens, documents)])
  inside = data.draw(st.integers(0, sum(lengths) - 1))
  position = epoch * sum(lengths) + inside
  expected = int(np.searchsorted(begins, position))
  assert order.first_from(position) == (expected, begins[expected])


def test_positions_kept_for_few_documents_find_all(monkeypatch):
  lengths = np.random.default_rng(0).integers(1, 30, 2000)
  tokens = numbered(lengths)
  expected = [
    DocumentOrder(tokens, "key").first_from(position)
    for position in range(0, 3 * sum(lengths), 977)
  ]
  # However many documents are summed at once, and kept apart.
  for stride, chunk in ((16, 64), (256, 512), (1024, 1024)):
    monkeypatch.setattr(document_order, "_STRIDE", stride)
    monkeypatch.setattr(document_order, "_CHUNK", chunk)
    order = DocumentOrder(tokens, "key")
    assert expected == [
      order.first_from(position) for position in range(0, 3 * sum(lengths), 977)
    ]
    assert len(order._sparse(0)) == -(-2000 // stride)
