# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches import row_streams
from palm_mtf.data.batches.packing import WholeRows
from palm_mtf.data.batches.row_streams import (
  BLOCK_ROWS,
  DocumentOrder,
  DocumentStream,
  JoinedStream,
  MixedRows,
  Mixture,
  RowSource,
  TokenSource,
)
from palm_mtf.data.tokens.shard import TokenArray
from tests.data.small_sources import (
  EOD,
  examples,
  numbered,
  repeatable,
  token_array,
)

_LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=40)


def lengths_of(tokens: TokenArray, documents: np.ndarray) -> np.ndarray:
  begins, ends = tokens.extents(documents)
  return ends - begins


@pytest.mark.parametrize(("stride", "chunk"), [(4, 8), (256, 1 << 20)])
@hypothesis.given(_LENGTHS, st.integers(0, 3), st.data())
@repeatable(30)
def test_a_position_is_found_as_by_adding_up_all_lengths_before(
  monkeypatch, stride, chunk, lengths, epoch, data
):
  # Neither the documents summed at once nor those per kept position matter.
  monkeypatch.setattr(row_streams, "_STRIDE", stride)
  monkeypatch.setattr(row_streams, "_CHUNK", chunk)
  tokens = numbered(lengths)
  order = DocumentOrder(tokens, "key")
  _, documents = order.documents(0, (epoch + 2) * len(lengths))
  begins = np.cumsum([0, *lengths_of(tokens, documents)])
  inside = data.draw(st.integers(0, sum(lengths) - 1))
  position = epoch * sum(lengths) + inside
  expected = int(np.searchsorted(begins, position))
  assert order.first_from(position) == (expected, begins[expected])


LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


def stream_of(*sources: tuple[float, list[int]], seed: int = 0):
  """Returns the stream of sources, each a rate and its documents' lengths."""
  return DocumentStream(
    [
      TokenSource(str(i), rate, numbered(lengths))
      for i, (rate, lengths) in enumerate(sources)
    ],
    seed=seed,
  )


def of_source(stretches, source: int) -> list:
  return [x for x in stretches if x.source == source]


@pytest.fixture(params=[50, 1 << 26])
def block_tokens(request, monkeypatch):
  """Sets the tokens per block, smaller than documents or than sources."""
  monkeypatch.setattr(row_streams, "_BLOCK_TOKENS", request.param)
  return request.param


@pytest.mark.parametrize("rates", [[1.0], [0.5, 0.3, 0.2]])
def test_documents_come_whole_and_once_in_every_epoch(block_tokens, rates):
  parts = np.split(LENGTHS, [100, 140][: len(rates) - 1])
  sources = [*zip(rates, parts, strict=True)]
  stream = stream_of(*sources)
  found = stream.stretches(0, 20_000)[:-1]  # the last is cut
  for source, (_, lengths) in enumerate(sources):
    mine = of_source(found, source)
    for epoch, group in itertools.groupby(mine, lambda x: x.epoch):
      documents = [x.document for x in group]
      assert len(set(documents)) == len(documents)
      if epoch < mine[-1].epoch:
        assert sorted(documents) == list(range(len(lengths)))
    assert all(x.begin == 0 and x.length == lengths[x.document] for x in mine)


@pytest.mark.parametrize("rates", [(0.5, 0.3, 0.2), (0.9, 0.09, 0.01)])
def test_every_source_has_its_rate_of_tokens_to_within_a_document(
  block_tokens, rates
):
  parts = LENGTHS[:100], LENGTHS[100:140], LENGTHS[140:]
  stream = stream_of(*zip(rates, parts, strict=True))
  for block in (1, 2, 7, 10**6):
    position = stream.start_of(block)
    numbers = stream._starts(block)
    for (_, tokens), rate in zip(numbers, rates, strict=True):
      assert abs(tokens - rate * position) <= 3 * 60


def test_neighbours_are_of_one_source_no_more_often_than_chance():
  rates = (0.5, 0.3, 0.2)
  stream = stream_of(*((rate, [7] * 3000) for rate in rates))
  found = stream.stretches(0, 7 * 9000)
  pairs = itertools.pairwise(x.source for x in found)
  share = np.mean([one == other for one, other in pairs])
  chance, count = sum(rate**2 for rate in rates), len(found)
  assert abs(share - chance) < 4 * (chance * (1 - chance) / count) ** 0.5
  # And neighbors from one source are not neighbors in its text.
  mine = [x.document for x in of_source(found, 0)]
  near = sum(abs(a - b) == 1 for a, b in itertools.pairwise(mine))
  assert near < 12  # 2 are expected, as 2 / 3,000 of pairs are


def rows_of(tokens, length, *, masked=False, seed=0) -> JoinedStream:
  source = TokenSource("source", 1.0, tokens)
  return JoinedStream(
    [source], length, eod_id=EOD if masked else None, seed=seed
  )


@hypothesis.given(st.integers(1, 20), st.integers(1, 4), st.integers(0, 9))
@repeatable(12)
def test_every_epoch_reads_every_token_once(length, num_epochs, seed):
  tokens = numbered(LENGTHS[:40])
  rows = rows_of(tokens, length, seed=seed)
  count = -(-num_epochs * len(tokens) // length)
  read = np.concatenate([x["targets"] for x in rows.read(np.arange(count))])
  times = np.bincount(read, minlength=len(tokens))
  # The last row may reach into the next epoch.
  assert times.sum() - num_epochs * len(tokens) < length
  assert times.min() == num_epochs


@pytest.mark.parametrize("block_tokens", [2500, 1 << 26])
def test_rows_are_shuffled_among_those_of_a_block(block_tokens, monkeypatch):
  monkeypatch.setattr(row_streams, "_BLOCK_TOKENS", block_tokens)
  book = numbered([3, 5000, 4])  # one document of many rows
  rows = rows_of(book, 10)
  found = rows.pieces(np.arange(500))
  begins = [
    piece.begin for row in found for piece in row if piece.document == 1
  ]
  in_order = sum(b - a == 10 for a, b in itertools.pairwise(begins))
  assert len(begins) > 490
  # A book is one block, however small blocks are, because it is not cut.
  assert in_order < 10


@hypothesis.given(
  st.lists(examples(5), min_size=1, max_size=6),
  st.integers(1, 12),
  st.booleans(),
  st.booleans(),
)
@repeatable(25)
def test_joined_rows_follow_the_rules_token_by_token(
  documents, length, masked, has_inputs
):
  tokens = token_array(documents, has_inputs=has_inputs)
  rows = rows_of(tokens, length, masked=masked)
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


PALM = [0.50, 0.27, 0.13, 0.05, 0.04, 0.01]  # PaLM, Table 2

_rates = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=8)


@pytest.mark.parametrize(
  ("rates", "rows"),
  [
    (PALM, [5000, 2700, 1300, 500, 400, 100]),
    ([1, 1, 1], [3334, 3333, 3333]),
    ([1, 2, 4], [1429, 2857, 5714]),  # 1428.57, 2857.14, 5714.29
    ([10.4, 20.2, 69.4], [1040, 2020, 6940]),
    ([1.0, 1e-12], [9999, 1]),  # a tiny rate has a row in every block
    ([1.0, *[1e-6] * 50], [9950, *[1] * 50]),
  ],
)
def test_rates_are_met_exactly_or_by_the_largest_remainders(rates, rows):
  assert Mixture(rates, seed=0).rows_of_block.tolist() == rows


@hypothesis.given(_rates, st.integers(0, 99), st.integers(0, 10**6))
@repeatable(8)
def test_every_block_has_the_exact_counts_and_the_next_rows_of_each_source(
  rates, seed, block
):
  mixture = Mixture(rates, seed=seed)
  first = block * BLOCK_ROWS
  sources, rows = mixture.locate(first + np.arange(BLOCK_ROWS))
  for source, count in enumerate(mixture.rows_of_block.tolist()):
    mine = rows[sources == source]
    assert mine.tolist() == list(range(block * count, (block + 1) * count))


@pytest.mark.parametrize("seed", range(2))
def test_rates_hold_to_within_sampling_error_at_any_prefix(seed):
  sources, _ = Mixture(PALM, seed=seed).locate(np.arange(3 * BLOCK_ROWS))
  n = np.arange(1, len(sources) + 1)
  for source, rate in enumerate(PALM):
    seen = np.cumsum(sources == source)
    # The deviation of independent draws; draws without replacement in a block
    # deviate less. The worst of 30,000 prefixes may deviate five times as much.
    deviation = np.sqrt(n * rate * (1 - rate))
    assert (np.abs(seen - n * rate) <= 5 * deviation + 1).all()
    assert (seen - n * rate)[BLOCK_ROWS - 1 :: BLOCK_ROWS].tolist() == (
      pytest.approx([0, 0, 0], abs=1e-6)
    )


def mixed(*sources: tuple[float, int], seed: int = 0) -> MixedRows:
  """Returns the rows of sources, each a rate and a number of documents."""
  return MixedRows(
    [
      RowSource(
        str(i), rate, WholeRows(numbered([4] * n), 4, packed=False, seed=0)
      )
      for i, (rate, n) in enumerate(sources)
    ],
    seed=seed,
  )


def places(rows: MixedRows, first: int, count: int) -> list:
  """Returns the document of each row; a row has one."""
  found = rows.pieces(first + np.arange(count))
  return [piece for (piece,) in found]


def test_each_source_of_a_mixture_ends_an_epoch_before_the_next():
  found = places(mixed((0.7, 30), (0.3, 20)), 0, 800)
  for name, rows in (("0", 30), ("1", 20)):
    mine = [p for p in found if p.source == name]
    assert len(mine) > 150
    for start in range(0, len(mine) - rows, rows):
      epoch = mine[start : start + rows]
      assert {p.epoch for p in epoch} == {start // rows}
      assert len({p.document for p in epoch}) == rows


def test_every_epoch_every_seed_and_every_source_has_its_own_order():
  orders = {
    tuple(p.document for p in places(mixed((1.0, 64), seed=seed), 64 * e, 64))
    for seed in range(10)
    for e in range(10)
  }
  assert len(orders) == 100
  found = places(mixed((0.5, 1000), (0.5, 1000)), 0, 2000)
  one, two = ([p.document for p in found if p.source == x] for x in "01")
  assert one[:500] != two[:500]
