# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches import document_stream
from palm_mtf.data.batches.document_stream import TokenSource
from palm_mtf.data.batches.joined_rows import JoinedStream
from tests.data.small_sources import (
  EOD,
  examples,
  numbered,
  repeatable,
  token_array,
)

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


def stream_of(tokens, length, *, masked=False, seed=0) -> JoinedStream:
  source = TokenSource("source", 1.0, tokens)
  return JoinedStream(
    [source], length, eod_id=EOD if masked else None, seed=seed
  )


@hypothesis.given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 9))
@repeatable(40)
def test_every_epoch_reads_every_token_once(length, num_epochs, seed):
  tokens = numbered(LENGTHS[:40])
  rows = stream_of(tokens, length, seed=seed)
  count = -(-num_epochs * len(tokens) // length)
  read = np.concatenate([x["targets"] for x in rows.read(np.arange(count))])
  times = np.bincount(read, minlength=len(tokens))
  # The last row may reach into the next epoch.
  assert times.sum() - num_epochs * len(tokens) < length
  assert times.min() == num_epochs


@pytest.mark.parametrize("block_tokens", [2500, 1 << 26])
def test_rows_are_shuffled_among_those_of_a_block(block_tokens, monkeypatch):
  monkeypatch.setattr(document_stream, "_BLOCK_TOKENS", block_tokens)
  book = numbered([3, 5000, 4])  # one document of many rows
  rows = stream_of(book, 10)
  found = rows.pieces(np.arange(500))
  begins = [
    piece.begin for row in found for piece in row if piece.document == 1
  ]
  in_order = sum(b - a == 10 for a, b in itertools.pairwise(begins))
  assert len(begins) > 490
  # A book is one block, however small blocks are: it is not cut.
  assert in_order < 10


@hypothesis.given(
  st.lists(examples(5), min_size=1, max_size=6),
  st.integers(1, 12),
  st.booleans(),
  st.booleans(),
)
@repeatable(60)
def test_joined_rows_follow_the_rules_token_by_token(
  documents, length, masked, has_inputs
):
  tokens = token_array(documents, has_inputs=has_inputs)
  rows = stream_of(tokens, length, masked=masked)
  numbers = np.arange(2 * len(tokens) // length + 2)
  read, pieces = rows.read(numbers), rows.pieces(numbers)
  for row, documents_of_row in zip(read, pieces, strict=True):
    stream, weights = [], []
    for piece in documents_of_row:
      inputs, text = documents[piece.document]
      part = slice(piece.begin, piece.begin + piece.tokens)
      stream += [*inputs, *text, EOD][part]
      given = [0.0 if has_inputs else 1.0] * len(inputs)
      weights += [*given, *[1.0] * (len(text) + 1)][part]
    assert row["targets"].tolist() == stream
    segment, previous = 1, 0
    for place, token in enumerate(stream):
      if masked and previous == EOD:
        segment, previous = segment + 1, 0
      assert row["inputs"][place] == previous
      if masked:
        assert row["segments"][place] == segment
      previous = token
    if has_inputs:
      assert row["loss_weights"].tolist() == weights
  names = ["inputs", "targets"] + ["segments"] * masked
  assert list(read[0]) == names + ["loss_weights"] * has_inputs
  assert list(read[0]) == [*rows.features]
