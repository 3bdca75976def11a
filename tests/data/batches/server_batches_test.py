# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server that sees the token stores reads the batches of the client."""

import dataclasses
import json

import numpy as np
import pytest

from palm_mtf.config import DataConfig
from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from palm_mtf.data.batches.neighbours import NeighbourIndex, write_index
from palm_mtf.data.batches.server_batches import (
  batches_spec,
  find_batches,
  read_batch,
)
from tests.data.small_sources import load_corpus

SIZES, SKIPS = BatchSizes([[0, 4], [2, 8]]), Skips([[1, 1]])


@pytest.fixture(
  params=[
    *(("joined", 0), ("joined_masked", 0), ("packed", 0)),
    *(("joined", 3), ("packed", 3), ("with neighbours", 0)),
  ]
)
def corpus(request, folder, vocabulary, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)  # a server may work in another folder
  packing, virtual = request.param
  has_neighbours = packing == "with neighbours"
  packing = "joined" if has_neighbours else packing
  data = DataConfig(
    text_files=f"{folder}/*.txt",
    vocabulary=None,
    validation_share=0.2,
    packing=packing,
  )
  corpus = load_corpus("run", data, vocabulary, sequence_length=64, seed=3)
  corpus = dataclasses.replace(corpus, virtual=virtual)
  if has_neighbours:
    write_index("chunks", [x.train.tokens for x in corpus.stores], 8, "v")
    index = NeighbourIndex("chunks", 2, 8, "v")
    corpus = dataclasses.replace(corpus, neighbours=index)
  spec = batches_spec(corpus, SIZES, SKIPS).encode()
  monkeypatch.chdir("/")
  return corpus, spec


def test_a_host_reads_its_part_of_any_step(corpus):
  corpus, spec = corpus
  assert find_batches(spec) == b""
  batches = corpus.batches(SIZES, SKIPS)
  for step, num_parts in ((0, 1), (1, 2), (2, 4), (3, 4), (1, 2)):
    for part in range(num_parts):
      read = read_batch(
        spec, np.int64(step), np.int32(part), np.int32(num_parts)
      )
      expected = batches.batch(step, part, num_parts)
      assert len(read) == len(expected)
      for name, rows in zip(batches.features, read, strict=True):
        np.testing.assert_equal(rows, expected[name])


def test_a_host_says_why_it_cannot_read_the_batches(corpus):
  _, spec = corpus
  held = json.loads(spec)
  moved = json.dumps({**held, "stores": ["/nowhere"]}).encode()
  assert b"nowhere" in find_batches(moved)
  other = json.dumps({**held, "fingerprint": "of other tokens"}).encode()
  assert find_batches(other) == b"ValueError: these are other tokens"
