# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hypothesis
import numpy as np
from hypothesis import strategies as st

from palm_mtf.data.batches.mixed_rows import MixedRows, RowSource
from palm_mtf.data.batches.packing import WholeRows
from palm_mtf.data.batches.shuffle import shuffle
from tests.data.small_sources import numbered, repeatable


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
  """Returns the document of each row, one a row."""
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
