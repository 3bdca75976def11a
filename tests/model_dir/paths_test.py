# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The paths of a MODEL_DIR are those that runs have."""

from pathlib import Path

import pytest

from palm_mtf.model_dir.paths import ModelDir, step_name, step_of

OLD_RUN = Path(__file__).parents[1] / "old_run" / "run"


def test_a_run_that_exists_has_these_files():
  run = ModelDir(str(OLD_RUN))
  for path in (
    run.config,
    run.vocabulary,
    run.metrics,
    run.samples,
    run.tokens,
    run.checkpoint(4),
  ):
    assert Path(path).exists(), path


@pytest.mark.parametrize("step", [0, 200, 99_999_999, 100_000_000])
def test_a_name_tells_its_step(step):
  assert step_of(f"any/where/{step_name(step)}") == step


@pytest.mark.parametrize(
  "name", ["step_0000020", "step_00000200.damaged", ".partial_step_00000200"]
)
def test_other_names_are_of_no_step(name):
  assert step_of(name) is None
