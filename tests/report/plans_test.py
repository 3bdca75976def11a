# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Times and verdicts are formatted for people."""

import pytest

from palm_mtf.report.plans import format_duration, format_verdict


@pytest.mark.parametrize(
  ("secs", "text"),
  [
    (1.25, "1.2 seconds"),
    (90, "90.0 seconds"),
    (150, "2.5 minutes"),
    (3 * 3600, "3.0 hours"),
    (37.9 * 86_400, "37.9 days"),
  ],
)
def test_a_duration_has_the_unit_that_is_at_least_two(secs, text):
  assert format_duration(secs) == text


def test_a_verdict_names_settings_that_would_fit():
  plan = {
    "device_bytes": {"weights": 3 * 2**30, "slots": 6 * 2**30},
    "memory_bytes": 8 * 2**30,
    "fits": False,
    "nearest": {"REMAT": "layer", "NUM_MICROBATCHES": 4},
  }
  assert format_verdict(plan) == (
    "does not fit: 9.00 of 8.00 GiB per device; this would: REMAT = 'layer', "
    "NUM_MICROBATCHES = 4"
  )
  assert "use more devices" in format_verdict({**plan, "nearest": None})
  assert (
    format_verdict({**plan, "fits": True})
    == "fits: 9.00 of 8.00 GiB per device"
  )
