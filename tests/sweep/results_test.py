# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A curve has the losses of a run, and says when the run is to stop."""

import json

import numpy as np
import pytest

from palm_mtf.config import SweepConfig
from palm_mtf.model_dir.layout import SweepDir
from palm_mtf.sweep.results import read_curve, should_stop, tabulate
from tests.config.run_test import PALM
from tests.sweep.laws import sweep_run


def test_seconds_are_those_of_all_steps_before_an_evaluation(tmp_path):
  lines = [
    {"step": 2, "tokens": 64, "step_secs": 0.5},
    {"step": 3, "tokens": 96},  # traced: not timed
    {"step": 6, "tokens": 192, "step_secs": 2.0, "validation_loss": 4.0},
  ]
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  curve = read_curve(sweep_run(tmp_path))
  assert (curve.losses, curve.tokens, curve.secs) == ([4.0], [192], [7.0])
  # By hand for 2 layers of 32 with 4 heads of 8 and 64 wide, 300 pieces: a
  # multiply-add is 2 FLOPs, and three passes are one step.
  parameters = 300 * 32 + 2 * (2 * 32 * 32 + 2 * 32 * 8 + 3 * 32 * 64)
  attention = 2 * 2 * 2 * 32 * PALM.sequence_length
  assert curve.flops == [192 * 3 * (2 * parameters + attention)]


def test_losses_that_are_not_finite_are_nan_and_in_no_row(tmp_path):
  # null as it is written now, NaN as by earlier versions.
  losses = ["null", "4.0", "NaN"]
  lines = [
    f'{{"step": {i}, "tokens": {i}, "validation_loss": {loss}}}\n'
    for i, loss in enumerate(losses, start=1)
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(lines))
  run = sweep_run(tmp_path)
  np.testing.assert_array_equal(read_curve(run).losses, [np.nan, 4.0, np.nan])
  (row,) = tabulate([run], SweepDir(str(tmp_path)))
  assert (row["loss"], row["best_loss"]) == (None, 4.0)


@pytest.mark.parametrize(
  ("losses", "is_stopped"),
  [
    ([], False),
    ([3.0], False),
    ([3.0, 3.1], False),
    ([3.0, 3.1, 3.2], True),
    ([3.0, 3.1, 2.8, 3.0], False),
    ([3.0, 3.1, 2.8, 3.0, 2.75], True),
    # Two decreases that are each too small to count, though not together.
    ([3.0, 2.95, 2.91], True),
    ([3.0, 2.95, 2.89], False),
  ],
)
def test_patience_counts_evaluations_since_the_last_better_loss(
  losses, is_stopped
):
  sweep = SweepConfig(sweep_patience=2, sweep_min_delta=0.1)
  assert should_stop(losses, sweep) == is_stopped


def test_without_patience_no_run_is_stopped():
  sweep = SweepConfig(sweep_patience=None)
  assert not should_stop([1.0, 2.0, 3.0, 4.0], sweep)
