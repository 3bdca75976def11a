# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench measures each figure; its break-even is interpolated."""

import pytest

from tools.bench.cases.dispatch import find_break_even


def test_the_break_even_lies_between_the_operations_next_to_it():
  ratios = [(1e-3, 0.5), (4e-3, 0.8), (16e-3, 1.0)]
  assert find_break_even(ratios) == pytest.approx(
    8e-3
  )  # halfway, in logarithms
  assert find_break_even([(1e-3, 0.95)]) == 1e-3
  assert find_break_even(ratios[:2]) is None


@pytest.mark.slow  # starts a server
def test_each_figure_has_its_kinds(measure):
  flags = ["--servers=1", "--rounds=1", "--length=8"]
  kinds = {(x["figure"], x["kind"]) for x in measure("dispatch", *flags)}
  assert {(5, x) for x in ("op_by_op", "chained", "fused")} <= kinds
  assert {(6, "break-even"), (7, "parallel"), (7, "sequential")} <= kinds
