# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A stack holds all layers, unless a message would be too large."""

import pytest

from palm_mtf.mesh.tpu.stacked_variables import cut_stacks


@pytest.mark.parametrize(
  ("num_bytes", "sizes"),
  [
    (1, [7]),
    (2**30 // 7, [7]),
    (2**30 // 7 + 1, [6, 1]),
    (2**29, [2, 2, 2, 1]),
    (2**40, [1] * 7),  # one variable may be larger than a message
  ],
)
def test_a_stack_has_at_most_a_gibibyte_and_all_are_in_one(num_bytes, sizes):
  stacks = cut_stacks(range(7), num_bytes)
  assert [len(each) for each in stacks] == sizes
  assert [x for each in stacks for x in each] == list(range(7))
