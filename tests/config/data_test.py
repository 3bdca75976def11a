# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The longest text that fits into a row of span corruption."""

import pytest

from palm_mtf.config.data import SpanCorruption


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("mean", [1.0, 3.0, 100.0])
def test_the_longest_text_fits_a_row_and_no_longer_one_does(density, mean):
  noise = SpanCorruption(density, mean)
  for row in range(1, 300):
    fitting = [n for n in range(row + 1) if noise.row_length(n) <= row]
    assert noise.longest_text(row) == max(fitting)


def test_the_longest_text_of_a_very_long_row_takes_a_few_looks():
  looked_at = []

  class Counted(SpanCorruption):
    def row_length(self, length: int) -> int:
      looked_at.append(length)
      return super().row_length(length)

  Counted(0.99, 1.0).longest_text(2**24)
  assert len(looked_at) < 100
