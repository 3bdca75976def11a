# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulated goodput is that of a formula, and that of the published table."""

import pytest

from palm_mtf.accounting.goodput import goodput
from tools.bench.cases import goodput as simulation


@pytest.mark.parametrize("mtbf_hours", [0.3, 3.0])
def test_the_simulation_of_restarts_agrees_with_the_formula(
  mtbf_hours, measure
):
  chips = 1000
  (record,) = measure(
    "goodput",
    *["--kinds=restarted", f"--chips={chips}", "--learners=1", "--seeds=1"],
    *[f"--mtbi_hours={round(mtbf_hours * chips)}", "--hours=3000"],
  )
  expected = goodput(3600 * mtbf_hours, 600.0, 600.0)
  assert record["goodput"] == pytest.approx(expected, abs=0.02)


def test_learners_reach_the_goodput_published_for_decoupled_diloco(measure):
  """Two constants that fit one learner predict 2 to 16 within 4 points."""
  records = measure(
    "goodput", "--seeds=1", "--chips=1200000,2400000", "--hours=24"
  )
  published = [x for x in records if x["published"] is not None]
  assert len(published) == len(simulation.PUBLISHED)
  for each in published:
    assert each["goodput"] == pytest.approx(each["published"], abs=0.04), each
    assert each["goodput"] == pytest.approx(each["closed_form"], abs=0.01)
  of = {(x["kind"], x["chips"], x["learners"]): x for x in records}
  # The blog of Decoupled DiLoCo: 88% against 27%, at 1.2 million chips.
  assert of["elastic", 1_200_000, 8]["goodput"] > 0.85
  assert of["waiting", 1_200_000, 1]["goodput"] < 0.3
  assert of["elastic", 2_400_000, 8]["uptime"] == 1.0
