# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench measures each figure; its break-even is interpolated."""

import json
import math

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
def test_each_figure_has_its_kinds(run_bench):
  code, out, _ = run_bench(
    "dispatch", "--servers=1", "--rounds=1", "--length=8", "--json"
  )
  assert code == 0
  records = [json.loads(x) for x in out.splitlines()]
  kinds = {(x["figure"], x["kind"]) for x in records}
  for kind in ("op_by_op", "chained", "fused"):
    assert (5, kind) in kinds
  assert {(6, "break-even"), (7, "parallel"), (7, "sequential")} <= kinds
  for record in records:
    assert record["secs"] is None or 0 < record["secs"] < math.inf


def test_an_unknown_figure_is_one_line(run_bench):
  code, _, said = run_bench("dispatch", "--figures=8")
  assert code == 2
  assert said.startswith("bench dispatch: --figures = '8'")
