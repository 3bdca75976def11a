# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Skipped batches are never read; all other batches are, once and in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.config.run import BatchSizes
from palm_mtf.config.watch import Skips
from tests.data.small_sources import repeatable
from tests.refusals import message_of

RANGES = st.lists(
  st.tuples(st.integers(0, 30), st.integers(0, 5)).map(
    lambda pair: [pair[0], pair[0] + pair[1]]
  ),
  max_size=4,
)
SIZES = st.sampled_from([3, [[0, 2], [7, 5]], [[0, 4], [3, 1], [9, 6]]])


@given(RANGES, SIZES)
@repeatable(100)
def test_rows_are_all_but_those_of_the_batches_left_out(ranges, size):
  sizes = BatchSizes(size)
  left_out = {step for a, b in ranges for step in range(a, b + 1)}
  expected = [
    sizes.rows_before(step) + i
    for step in range(60)
    if step not in left_out
    for i in range(sizes.size(step))
  ]
  seen = Skips(ranges).rows(np.arange(len(expected)), sizes)
  assert seen.tolist() == expected


@given(RANGES, RANGES, SIZES)
@repeatable(100)
def test_it_does_not_matter_in_which_order_ranges_came(first, second, size):
  sizes, rows = BatchSizes(size), np.arange(200)
  one, other = Skips(first).and_also(second), Skips(second + first)
  assert one.ranges == other.ranges
  np.testing.assert_array_equal(one.rows(rows, sizes), other.rows(rows, sizes))


@given(st.integers(0, 100), SIZES)
@repeatable(100)
def test_the_batch_of_a_row_is_the_step_that_reads_it(row, size):
  sizes = BatchSizes(size)
  step = sizes.step_of_row(row)
  first = sizes.rows_before(step)
  assert first <= row < first + sizes.size(step)


@pytest.mark.parametrize(
  "value", [None, 3, [3], [[3]], [[4, 3]], [[-1, 3]], [[1, 2.0]], ["12"]]
)
def test_what_is_no_list_of_ranges_is_refused(value):
  assert message_of(Skips, value) == (
    f"SKIP_STEPS = {value!r}: give pairs of the first and the last batch to "
    "leave out, such as [[1000, 1299]], or [] for none."
  )
