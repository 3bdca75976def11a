# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Every token is scored once, with as much before it as is said."""

import pytest

from palm_mtf.generation.inference.score_windows import (
  Window,
  row_length,
  rows_at_once,
  windows,
)


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 1), (7, 3), (7, 7)])
def test_each_token_of_a_document_is_scored_once_with_enough_before_it(
  length, stride
):
  for num_tokens in range(1, 30):
    found = windows(num_tokens, 0, length, stride)
    scored = [place for w in found for place in range(w.first, w.stop)]
    assert scored == list(range(num_tokens))
    for w in found:
      assert 0 <= w.start <= w.first < w.stop <= w.start + length
      for place in range(w.first, w.stop):
        assert place - w.start >= min(place, length - stride)


def test_the_picture_of_the_module_is_right():
  assert windows(10, 0, 4, 2) == [
    Window(0, 0, 4),
    Window(2, 4, 6),
    Window(4, 6, 8),
    Window(6, 8, 10),
  ]


@pytest.mark.parametrize(
  ("num_tokens", "first", "expected"),
  [
    (8, 5, [(0, 5, 8)]),
    (11, 5, [(3, 5, 11)]),  # the inputs lose their beginning
    (13, 5, [(5, 5, 13)]),
    (14, 5, [(5, 5, 13), (6, 13, 14)]),  # a text of its own
  ],
)
def test_targets_stay_together_and_keep_the_end_of_their_inputs(
  num_tokens, first, expected
):
  assert windows(num_tokens, first, 8, 4) == expected


def test_rows_have_few_lengths_and_no_row_is_twice_as_long_as_it_must_be():
  lengths = [row_length(n, 300) for n in range(1, 301)]
  assert set(lengths) == {32, 64, 128, 256, 300}
  assert all(n <= length <= 300 for n, length in enumerate(lengths, 1))
  assert all(
    length < 2 * n for n, length in enumerate(lengths, 1) if length > 32
  )
  assert row_length(3, 20) == 20


def test_longer_rows_are_fewer_at_once_and_divide_among_slices():
  assert [rows_at_once(x, 1) for x in (32, 64, 2048, 4096)] == [64, 32, 1, 1]
  assert rows_at_once(2048, 3) == 3
  assert rows_at_once(32, 3) % 3 == 0
