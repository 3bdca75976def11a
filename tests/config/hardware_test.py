# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rates that no chip can have are refused by their macro."""

import pytest

from palm_mtf.config import HardwareConfig
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"chip_memory_bytes": "32 GB"},
      "CHIP_MEMORY_BYTES = '32 GB': give a number from 0 to 1e+30.",
    ),
    ({"chip_watts": -1}, "CHIP_WATTS = -1: give a number from 0 to 1e+30."),
    (
      {"chip_link_bandwidth": float("nan")},
      "CHIP_LINK_BANDWIDTH = nan: give a number from 0 to 1e+30.",
    ),
    ({"chip_devices": 0}, "CHIP_DEVICES = 0: give a number above 0."),
    ({"chip_efficiency": 1.5}, "CHIP_EFFICIENCY = 1.5: a share, at most 1."),
    (
      {"chip_pass_bandwidths": {"float32": {"blocks": 0}}},
      "CHIP_PASS_BANDWIDTHS = {'float32': {'blocks': 0}}: give bytes/s by",
    ),
    (
      {"chip_pass_bandwidths": 5e9},
      "CHIP_PASS_BANDWIDTHS = 5000000000.0: give bytes/s by dtype and kind",
    ),
    ({"chip_efficiency": None}, "CHIP_EFFICIENCY = None: give a number"),
  ],
)
def test_a_wrong_rate_is_named(settings, message):
  with pytest.raises(UserError) as error:
    HardwareConfig(**settings)
  assert str(error.value).startswith(message)


def test_what_is_not_published_is_none():
  assert HardwareConfig().chip_dcn_bandwidth is None
