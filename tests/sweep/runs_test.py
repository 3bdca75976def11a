# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table has the last and the best loss of a run."""

import json

from palm_mtf.model_dir.paths import SweepDir
from palm_mtf.sweep.runs import tabulate
from tests.sweep.laws import sweep_run


def test_seconds_are_those_of_all_steps_before_an_evaluation(tmp_path):
  lines = [
    {"step": 2, "tokens": 64, "step_secs": 0.5},
    {"step": 3, "tokens": 96},  # traced: not timed
    {"step": 6, "tokens": 192, "step_secs": 2.0, "validation_loss": 4.0},
  ]
  path = tmp_path / "metrics.jsonl"
  path.write_text("".join(json.dumps(x) + "\n" for x in lines))
  (row,) = tabulate([sweep_run(tmp_path)], SweepDir(str(tmp_path)))
  assert (row["loss"], row["tokens"], row["secs"]) == (4.0, 192, 7.0)


def test_losses_that_are_not_finite_are_in_no_row(tmp_path):
  # null as it is written now, NaN as by earlier versions.
  losses = ["null", "4.0", "NaN"]
  lines = [
    f'{{"step": {i}, "tokens": {i}, "validation_loss": {loss}}}\n'
    for i, loss in enumerate(losses, start=1)
  ]
  (tmp_path / "metrics.jsonl").write_text("".join(lines))
  run = sweep_run(tmp_path)
  (row,) = tabulate([run], SweepDir(str(tmp_path)))
  assert (row["loss"], row["best_loss"]) == (None, 4.0)
