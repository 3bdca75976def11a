# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunks find the neighbours that they should, and never their own document."""

import dataclasses
import itertools
import math
import os
import shutil
import types

import numpy as np
import pytest

from palm_mtf.config import DataConfig
from palm_mtf.config.neighbours import check_neighbours
from palm_mtf.data.batches.neighbours import (
  _ARRAYS,
  NeighbourIndex,
  write_index,
)
from palm_mtf.data.batches.row_streams import JoinedStream, TokenSource
from palm_mtf.data.tokens.shard import Shard, TokenArray
from palm_mtf.generation.inference.scorer import Example, Scorer
from palm_mtf.model_dir.foreign_files import MANIFEST, seal_folder
from tests.mtf_testing import small_config
from tests.refusals import message_of

EOD, CHUNK, COUNT = 1, 4, 2


def make_tokens(documents):
  tokens = np.concatenate([[*x, EOD] for x in documents])
  ends = np.cumsum([len(x) + 1 for x in documents])
  begins = np.append(0, ends[:-1])
  return TokenArray([Shard(tokens.astype("<u2"), np.stack([begins, ends]))])


@pytest.fixture(scope="module")
def documents():
  """Returns documents that share many pairs of tokens; two are equal."""
  rng = np.random.default_rng(0)
  found = [rng.integers(2, 7, rng.integers(3, 30)).tolist() for _ in range(40)]
  return [*found, found[7]]


@pytest.fixture(scope="module")
def folder(documents, tmp_path_factory):
  path = str(tmp_path_factory.mktemp("index") / "chunks")
  write_index(path, [make_tokens(documents)], CHUNK, "v")
  return path


def nearest(documents, chunk, hidden):
  """Returns the neighbours of a chunk by the definition, as lists."""

  def terms(tokens):
    return {*tokens} | {*itertools.pairwise(tokens)}

  chunks = [
    (number, document, begin)
    for number, document in enumerate(documents[:-1])  # equal ones once
    for document in [[*document, EOD]]
    for begin in range(0, len(document), CHUNK)
  ]
  own = [terms(x[i : i + CHUNK]) for _, x, i in chunks]
  scores = []
  for (number, _, _), of_chunk in zip(chunks, own, strict=True):
    both, total = of_chunk & terms(chunk), 0
    for term in both if number not in hidden else ():
      n = sum(term in x for x in own)
      if n <= max(64, len(own) // 16):
        total += round(16 * math.log2(len(own) / n))
    scores.append(total)
  order = sorted(range(len(chunks)), key=lambda i: (-scores[i], i))
  return [
    chunks[i][1][chunks[i][2] : chunks[i][2] + 2 * CHUNK]
    for i in order[:COUNT]
    if scores[i]
  ]


def as_lists(neighbours):
  found = neighbours.reshape(-1, COUNT, 2 * CHUNK).tolist()
  return [[[t for t in y if t >= 0] for y in x if y[0] >= 0] for x in found]


def test_neighbours_share_the_most_weight_and_are_of_no_document_of_the_row(
  documents, folder
):
  """A row of training text never finds its own documents, nor equal ones."""
  index, tokens = (
    NeighbourIndex(folder, COUNT, CHUNK, "v"),
    make_tokens(documents),
  )
  source = TokenSource("a", 1.0, tokens)
  stream = JoinedStream(
    [source], 12, eod_id=None, seed=3, first=0, neighbours=index
  )
  assert "neighbours" in stream.features
  numbers = np.arange(stream.num_rows)
  rows, pieces = stream.read(numbers), stream.pieces(numbers)
  found_own = 0
  for row, parts in zip(rows, pieces, strict=True):
    # Documents 7 and 40 are equal.
    hidden = {7 if x.document == 40 else x.document for x in parts}
    chunks = row["inputs"].reshape(-1, CHUNK).tolist()
    expected = [nearest(documents, x, hidden) for x in chunks]
    assert as_lists(row["neighbours"]) == expected
    found_own += expected != [nearest(documents, x, ()) for x in chunks]
  assert found_own > 5, "rows that would find themselves"
  # A row does not depend on the rows that were read before it.
  (again,) = stream.read(numbers[5:6])
  assert again["neighbours"].tobytes() == rows[5]["neighbours"].tobytes()


def test_the_documents_of_many_sources_are_listed_once(folder, monkeypatch):
  """A list takes longer than a row if there are millions of documents."""
  listed = []

  def spans(tokens, own=TokenArray.spans):
    listed.append(tokens)
    return own(tokens)

  monkeypatch.setattr(TokenArray, "spans", spans)
  texts = [make_tokens([[2, 3, 4], [5, 6]]) for _ in range(40)]
  sources = [TokenSource(f"{i}", 1.0, x) for i, x in enumerate(texts)]
  index = NeighbourIndex(folder, COUNT, CHUNK, "v")
  stream = JoinedStream(
    sources, 12, eod_id=None, seed=3, first=0, neighbours=index
  )
  stream.read(np.arange(stream.num_rows))
  assert len(listed) == len(set(listed)) == len(sources)


def test_an_index_that_does_not_fit_is_refused(folder, tmp_path, documents):
  def refusal(path=folder, chunk=CHUNK, vocabulary="v"):
    return message_of(NeighbourIndex, str(path), COUNT, chunk, vocabulary)

  assert "another vocabulary" in refusal(vocabulary="w")
  assert "chunks of 4 tokens, not CHUNK_LENGTH = 8" in refusal(chunk=8)
  assert "no whole index" in refusal(tmp_path)
  own = tmp_path / "changed"
  write_index(str(own), [make_tokens(documents)], CHUNK, "v")
  digest = NeighbourIndex(str(own), COUNT, CHUNK, "v").digest
  assert digest == NeighbourIndex(folder, COUNT, CHUNK, "v").digest
  chunks = np.load(own / "chunks.npy")
  np.save(own / "chunks.npy", chunks[::-1])
  assert "no whole index" in refusal(own)
  # Arrays that are sealed, but not those of an index.
  changes = (lambda x: x + 0.5, lambda x: -x, lambda x: x[:0], lambda x: x[:1])
  changes += (lambda x: x + 10**9, lambda x: x.astype(object), lambda x: x[0])
  for name, change in itertools.product(_ARRAYS, changes):
    # These may be any numbers.
    if name == "documents" and change in changes[1::3]:
      continue
    if name in ("tokens", "terms") and change is changes[4]:
      continue
    sealed = tmp_path / "sealed"
    shutil.copytree(folder, sealed)
    os.remove(sealed / MANIFEST)
    values = np.load(sealed / f"{name}.npy")
    values = np.asarray(change(values.astype(np.int64)))
    if values.dtype == np.int64:
      values = values.astype(_ARRAYS[name][0])
    np.save(sealed / f"{name}.npy", values, allow_pickle=True)
    seal_folder(str(sealed), {"chunk_length": CHUNK, "vocabulary": "v"})
    assert "no whole index" in refusal(sealed), name
    shutil.rmtree(sealed)


def test_settings_that_do_not_fit_are_refused():
  model = small_config(neighbours=2, chunk_length=4, sequence_length=12)
  data = DataConfig(
    text_files="*", vocabulary=None, validation_share=0.1, neighbour_index="a"
  )
  check_neighbours(model, data)
  for changes, of_data, expected in (
    ({}, {"neighbour_index": None}, "NEIGHBOUR_INDEX = None: set both"),
    ({"neighbours": 0}, {}, "NEIGHBOURS = 0 and NEIGHBOUR_INDEX = 'a'"),
    ({"sequence_length": 14}, {}, "set SEQUENCE_LENGTH = 12"),
    ({"positions": "t5"}, {}, "set POSITIONS to 'rotary' or 'none'"),
    ({}, {"packing": "packed"}, "set PACKING to 'joined'."),
    # A token would depend on documents that the mask hides from it.
    ({}, {"packing": "joined_masked"}, "set PACKING to 'joined'."),
    ({"objective": "prefix_lm"}, {}, "set OBJECTIVE to 'causal'"),
    (
      {
        "layers": "a, b",
        "variants": {"a": {"NEIGHBOURS": 1}, "b": {"NEIGHBOURS": 2}},
      },
      {},
      "NEIGHBOURS = 2 and NEIGHBOURS = 1",
    ),
  ):
    given = (
      dataclasses.replace(model, **changes),
      dataclasses.replace(data, **of_data),
    )
    assert expected in message_of(check_neighbours, *given)


def test_a_scored_text_never_finds_itself(documents, folder):
  """Not with inputs, nor without a token before them, nor in its windows."""

  class OnlyNeighbours(Scorer):
    def _run(self, names, inputs, targets, num_given, adapter=0, **more):
      found.extend(zip(inputs, more["neighbours"], num_given, strict=True))
      return [np.zeros(inputs.shape)]

  loaded = types.SimpleNamespace(
    config=types.SimpleNamespace(text_length=8), index=None, num_slices=1
  )
  index = NeighbourIndex(folder, COUNT, CHUNK, "v")
  number, text = max(enumerate(documents[:-1]), key=lambda x: len(x[1]))
  for adds_start, given in itertools.product((True, False), (0, 1, 5)):
    found = []
    scorer = OnlyNeighbours(
      loaded, adds_start=adds_start, neighbours=index, eod_id=EOD
    )
    dict(scorer.token_losses([Example(text[:given], text[given:])]))
    rows = [x for x in found if x[2]]  # others only fill the batch
    assert len(rows) > 1, "windows"
    for inputs, neighbours, _ in rows:
      chunks = inputs.reshape(-1, CHUNK).tolist()
      expected = [nearest(documents, x, {number}) for x in chunks]
      assert as_lists(neighbours) == expected
