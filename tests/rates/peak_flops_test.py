# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What MFU is measured against."""

from palm_mtf.rates.peak_flops import chip_flops_per_sec


def test_known_chip_has_its_published_peak():
  assert chip_flops_per_sec("tpu_v4", "bfloat16") == 275e12


def test_measured_peak_is_a_rate_a_cpu_can_have():
  """From an old laptop's core to a large server."""
  for dtype in ("float32", "bfloat16"):
    assert 1e9 < chip_flops_per_sec("measured", dtype) < 1e15
