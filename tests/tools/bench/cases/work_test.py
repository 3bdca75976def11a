# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Waits are shares of a step, and each kind of cost has its panel."""

import pytest

from tools.bench.cases import work


def test_waits_are_shares_of_the_median_step():
  steps = [
    {
      "step": 1,
      "step_secs": 60,
      "data_wait_secs": 9,
      "checkpoint_wait_secs": 0,
    },
    {"step": 2, "data_wait_secs": 9, "checkpoint_wait_secs": 0},  # not timed
    *(
      {
        "step": step,
        "step_secs": secs,
        "data_wait_secs": 0.001,
        "checkpoint_wait_secs": pause,
      }
      for step, secs, pause in [(3, 2, 0), (4, 1.5, 0.5), (5, 7, 0.1)]
    ),
  ]
  assert work.compute_shares(steps) == {
    "step_secs": 2,
    "data": pytest.approx(0.0005),
    "checkpoint": 0.25,
  }


def test_a_line_goes_through_its_points():
  assert work.fit_line([(1, 5), (2, 7), (4, 11)]) == pytest.approx((2, 3))


def test_every_kind_of_cost_has_a_panel(tmp_path):
  pytest.importorskip("matplotlib")
  points = {"value": 1.0, "low": 0.9, "high": 1.2}
  records = [
    *({"of": "batch", "x": x, **points} for x in work.BATCH_SIZES),
    *({"of": "layers", "x": x, **points} for x in work.LAYERS),
    {"of": "data", "x": "4.8M", "value": 1e-4},
    {"of": "checkpoint", "x": "4.8M", "value": 0.1},
  ]
  work.draw(records, str(tmp_path / "work.png"))
  assert [x.name for x in tmp_path.iterdir()] == ["work.png"]
