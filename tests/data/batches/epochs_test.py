# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Epochs counted from lengths equal the epochs that a run reads."""

import collections

import numpy as np
import pytest

from palm_mtf.config.run import BatchSizes
from palm_mtf.data.batches.epochs import EpochLengths, epochs_of_run
from palm_mtf.data.batches.objectives import CAUSAL
from palm_mtf.data.sources.document import Document
from palm_mtf.data.tokens.encoder import Encoder
from tests.data.small_sources import ExampleSource, ListSource, corpus_of

SIZES, STEPS, LENGTH = BatchSizes([[0, 20], [30, 40]]), 100, 24


def documents(count, seed, *, examples=False):
  """Returns texts of any length below a row; some are repeated."""
  rng = np.random.default_rng(seed)
  return [
    Document(
      "ab " * int(rng.integers(1, 6)),
      inputs="c " * int(rng.integers(1, 4)) if examples else None,
      weight=float(rng.choice([1.0, 1.0, 0.5, 2.0])),
    )
    for _ in range(count)
  ]


@pytest.mark.parametrize(
  "packing", ["joined", "joined_masked", "packed", "single"]
)
def test_epochs_are_those_of_the_rows_that_a_run_reads(
  packing, vocabulary, tmp_path
):
  held_out = ["never read in training"] * 9
  sources = [
    ListSource(documents(300, 0), held_out, name="large", rate=0.7),
    ExampleSource(
      documents(40, 1, examples=True), held_out, name="small", rate=0.3
    ),
  ]
  lengths = [EpochLengths() for _ in sources]
  with Encoder(vocabulary) as encoder:
    for source, each in zip(sources, lengths, strict=True):
      for split, document, counts in encoder.count(source.documents()):
        if split == "train":
          each.add(document, *counts)
  found = epochs_of_run(
    sources,
    lengths,
    num_rows=SIZES.rows_before(STEPS),
    sequence_length=LENGTH,
    packing=packing,
    objective=CAUSAL,
    seed=3,
  )
  corpus = corpus_of(
    sources,
    vocabulary,
    tmp_path,
    packing=packing,
    sequence_length=LENGTH,
    seed=3,
  )
  batches, read = corpus.batches(SIZES), collections.Counter()
  for step in range(STEPS):
    for row in batches.pieces(step):
      for piece in row:
        read[piece.source] += piece.tokens
  for source, store in zip(sources, corpus.stores, strict=True):
    reading = found[source.name]
    tokens = len(store.train.tokens)
    assert reading.epoch_tokens == tokens
    # All documents fit into a row: each epoch reads all of its tokens.
    assert reading.epochs == pytest.approx(read[source.name] / tokens, rel=0.03)
  assert found["large"].rate == pytest.approx(0.7, abs=1e-4)
  assert found["small"].epochs > 2 * found["large"].epochs > 2


def test_a_source_without_training_documents_has_no_epochs():
  found = epochs_of_run(
    [ListSource([], ["a"])],
    [EpochLengths()],
    num_rows=10,
    sequence_length=8,
    packing="packed",
    objective=CAUSAL,
    seed=0,
  )
  assert found["source"] == (1.0, 0, None)
