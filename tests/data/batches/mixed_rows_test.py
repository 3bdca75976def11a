# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import re

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches import mixed_rows
from palm_mtf.data.batches.mixed_rows import (
  BLOCK_ROWS,
  MixedRows,
  Mixture,
  RowSource,
)
from palm_mtf.data.batches.packing import WholeRows
from palm_mtf.data.batches.shuffle import shuffle
from tests.data.small_sources import numbered, repeatable

PALM = [0.50, 0.27, 0.13, 0.05, 0.04, 0.01]  # PaLM, Table 2

_rates = st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=8)


@hypothesis.given(_rates)
@repeatable(300)
def test_a_block_holds_each_source_to_within_a_row_of_its_rate(rates):
  counts = Mixture(rates, seed=0).rows_of_block
  shares = np.array(rates) / sum(rates) * BLOCK_ROWS
  assert counts.sum() == BLOCK_ROWS
  assert counts.min() >= 1
  # Sources with less than one row get one, at the expense of larger sources.
  lifted = int((shares < 1).sum())
  assert np.abs(counts - shares).max() < 1 + lifted


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
@repeatable(25)
def test_every_block_has_the_exact_counts_and_the_next_rows_of_each_source(
  rates, seed, block
):
  mixture = Mixture(rates, seed=seed)
  first = block * BLOCK_ROWS
  sources, rows = mixture.locate(first + np.arange(BLOCK_ROWS))
  for source, count in enumerate(mixture.rows_of_block.tolist()):
    mine = rows[sources == source]
    assert mine.tolist() == list(range(block * count, (block + 1) * count))


@pytest.mark.parametrize("seed", range(5))
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


def test_any_numbers_in_any_order_are_located_alike():
  mixture = Mixture(PALM, seed=0)
  numbers = np.arange(4 * BLOCK_ROWS)
  sources, rows = mixture.locate(numbers)
  some = np.random.default_rng(0).permutation(numbers)[:500]
  again = Mixture(PALM, seed=0).locate(some)
  assert np.array_equal(again[0], sources[some])
  assert np.array_equal(again[1], rows[some])


def test_seeds_and_blocks_have_orders_of_their_own():
  orders = {
    Mixture(PALM, seed=seed)
    .locate(block * BLOCK_ROWS + np.arange(BLOCK_ROWS))[0]
    .tobytes()
    for seed in range(3)
    for block in range(3)
  }
  assert len(orders) == 9


def test_the_example_of_the_docstring_follows_its_own_rule():
  doc = mixed_rows.__doc__
  letters = re.search(r"source  +([abc |]+)", doc)[1].replace("|", "").split()
  numbers = re.search(r"that source  +([\d |]+)", doc)[1].replace("|", "")
  assert sorted(letters[:10]) == [*"aaaaabbbcc"]
  seen = dict.fromkeys("abc", 0)
  for place, (letter, number) in enumerate(
    zip(letters, numbers.split(), strict=True)
  ):
    if place == 10:
      assert seen == {"a": 5, "b": 3, "c": 2}
    assert int(number) == seen[letter]
    seen[letter] += 1


def test_the_order_never_changes():
  # Resumed runs depend on exactly these numbers.
  sources, rows = Mixture(PALM, seed=0).locate(np.arange(12))
  assert sources.tolist() == [0, 1, 0, 2, 2, 1, 0, 1, 1, 1, 1, 2]
  assert rows.tolist() == [0, 0, 1, 0, 1, 1, 2, 2, 3, 4, 5, 2]


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


@hypothesis.given(st.integers(1, 40), st.integers(1, 4))
@repeatable(25)
def test_every_epoch_reads_every_row_once(num_rows, num_epochs):
  rows = mixed((1.0, num_rows))
  for epoch in range(num_epochs):
    found = places(rows, epoch * num_rows, num_rows)
    assert sorted(p.document for p in found) == list(range(num_rows))
    assert {p.epoch for p in found} == {epoch}


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


def test_a_row_far_away_is_what_counting_there_would_give():
  far = 16 * 10**9
  for i, piece in enumerate(places(mixed((1.0, 100)), far, 16)):
    epoch, index = divmod(far + i, 100)
    key = f"seed 0 source 0 epoch {epoch}"
    assert piece.epoch == epoch
    assert piece.document == shuffle(np.array([index]), 100, key)[0]
