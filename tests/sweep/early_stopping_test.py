# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run is stopped when its loss has not become better for too long."""

import pytest

from palm_mtf.config import SweepConfig
from palm_mtf.sweep.early_stopping import should_stop


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
