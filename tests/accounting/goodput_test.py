# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The goodput of plans is that of published formulas."""

import math

import pytest

from palm_mtf.accounting.goodput import goodput
from palm_mtf.accounting.plan import plan_of
from tests.planning import palm_540b

HOUR = 3600.0


def test_without_failures_all_of_the_time_is_useful():
  assert goodput(math.inf, 600.0, 600.0) == 1.0


def test_rare_failures_cost_half_a_segment_and_a_restart():
  """Young (1974): a failure undoes half of the work between checkpoints."""
  found = goodput(1000 * HOUR, HOUR, HOUR / 2)
  assert found == pytest.approx(1 - (0.5 + 0.5) / 1000, abs=2e-6)


def test_a_run_that_never_reaches_a_checkpoint_does_nothing():
  assert goodput(1.0, 1e6, 1e6) == 0.0


def test_a_plan_has_the_goodput_of_all_pods_and_of_learners():
  run = plan_of(palm_540b(CHIP_MTBI_HOURS=50_676))["run"]
  segment = palm_540b().run.checkpoint_steps * run["secs"] / run["steps"]
  mtbf = 50_676 * HOUR / 6144
  assert run["goodput"] == pytest.approx(goodput(mtbf, segment, 600.0))
  half = goodput(2 * mtbf, segment, 600.0)
  assert run["goodput_of_learners"] == pytest.approx(half)
  seldom = {"EXCHANGE": "diloco", "OUTER_STEPS": 100, "DCN_DTYPE": "float32"}
  run = plan_of(palm_540b(CHIP_MTBI_HOURS=50_676, **seldom))["run"]
  since_sync = 100 * run["secs"] / run["steps"]
  found = goodput(2 * mtbf, since_sync, 600.0)
  assert run["goodput_of_learners"] == pytest.approx(found)
  assert "goodput" not in plan_of(palm_540b())["run"]
