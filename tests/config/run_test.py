# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Batch sizes of a run, which may change from step to step."""

import hypothesis
import pytest
from hypothesis import strategies as st

from palm_mtf.config.run import BatchSizes
from tests.data.small_sources import repeatable
from tests.refusals import message_of

_ramps = st.lists(
  st.tuples(st.integers(1, 5), st.integers(1, 9)), min_size=1, max_size=5
)


@hypothesis.given(_ramps)
@repeatable(200)
def test_sizes_and_rows_before_are_those_of_counting_step_by_step(phases):
  pairs, every = [], []
  for length, size in phases:
    pairs.append([len(every), size])
    every += [size] * length
  sizes = BatchSizes(pairs)
  every += [phases[-1][1]] * 7
  for step, size in enumerate(every):
    assert sizes.size(step) == size
    assert sizes.rows_before(step) == sum(every[:step])
    later = [start for start, _ in pairs if start > step]
    assert sizes.next_change(step) == (later[0] if later else None)
  assert sizes.largest == max(every)
  assert (sizes.pairs, sizes.sizes) == (pairs, [size for _, size in phases])


def test_a_number_is_the_size_of_every_step():
  sizes = BatchSizes(16)
  assert (sizes.size(10**9), sizes.rows_before(10**9)) == (16, 16 * 10**9)
  assert (sizes.pairs, sizes.largest) == ([[0, 16]], 16)
  assert sizes.next_change(0) is None


@pytest.mark.parametrize(
  "value",
  [
    [],
    [[]],
    [[0]],
    [[0, 4, 4]],
    [[1, 4]],
    [[0, 4], [0, 8]],
    [[0, 4], [9, 8], [5, 16]],
    [[0, 0]],
    [[0, -4]],
    [[0, 4.0]],
    [[0, True]],
    [0, 4],
    "16",
    16.0,
    None,
  ],
)
def test_anything_else_is_an_error_that_shows_the_form(value):
  assert message_of(BatchSizes, value) == (
    f"GLOBAL_BATCH_SIZE = {value!r}: give a whole number, or pairs of a step "
    "and the size from this step on, with rising steps from 0, such as "
    "[[0, 512], [50000, 1024]]."
  )


@pytest.mark.parametrize("value", [0, -1, True])
def test_a_size_below_one_is_an_error(value):
  assert "give a whole number of at least 1" in message_of(BatchSizes, value)
