# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rates are the vendors' figures; an unknown chip is named, never guessed."""

import pytest

from palm_mtf.accounting.hardware import (
  check_chip,
  peak_flops_per_sec,
  peak_of_devices,
  share_chip,
)
from palm_mtf.config import HardwareConfig
from palm_mtf.errors import UserError
from tests.refusals import message_of
from tests.settings import hardware_of

UNKNOWN = HardwareConfig()


# TFLOP/s in bfloat16, GB of memory and its GB/s, from data sheets.
@pytest.mark.parametrize(
  ("chip", "tera_flops_per_sec", "gigabytes", "bandwidth"),
  [
    ("tpu_v2", 45, 17.2, 700),
    ("tpu_v3", 123, 34.4, 900),
    ("tpu_v4", 275, 34.4, 1200),
    ("tpu_v5e", 197, 16, 819),
    ("tpu_v5p", 459, 102, 2765),
    ("tpu_v6e", 918, 32, 1638),
    ("v100", 125, 32, 900),
    ("a100", 312, 80, 2039),
    ("h100_sxm", 989.4, 80, 3350),
    ("h200", 989.4, 141, 4800),
    ("b200", 2250, 180, 8000),
  ],
)
def test_the_rates_are_the_data_sheets(
  chip, tera_flops_per_sec, gigabytes, bandwidth
):
  hardware = hardware_of(chip)
  assert peak_flops_per_sec(chip, hardware) == tera_flops_per_sec * 1e12
  assert hardware.chip_memory_bytes / 1e9 == pytest.approx(gigabytes, rel=2e-3)
  assert hardware.chip_memory_bandwidth == bandwidth * 1e9
  check_chip(chip, hardware)


@pytest.mark.parametrize(
  ("chip", "nearest"),
  [("tpu_v4i", "tpu_v4"), ("h100", "h100_sxm"), ("A100", "a100")],
)
def test_an_unknown_chip_is_refused_with_the_nearest_name_and_the_list(
  chip, nearest
):
  assert message_of(check_chip, chip, UNKNOWN) == (
    f'CHIP = {chip!r} (did you mean "{nearest}"?): its peak FLOP/s is not '
    "known. Choose one of 'measured', 'a100', 'b200', 'h100_sxm', 'h200', "
    "'tpu_v2', 'tpu_v3', 'tpu_v4', 'tpu_v5e', 'tpu_v5p', 'tpu_v6e', 'v100', or "
    "set CHIP_BFLOAT16_FLOPS."
  )


@pytest.mark.parametrize("chip", ["measured", None, 3])
def test_only_a_chip_with_rates_has_a_peak(chip):
  check_chip("measured", UNKNOWN)  # the rate of this machine
  with pytest.raises(UserError, match=r"Choose one of 'measured', 'a100'"):
    peak_flops_per_sec(chip, UNKNOWN)


def test_a_chip_of_ones_own_needs_its_peak_alone():
  mine = HardwareConfig(chip_bfloat16_flops=3e12)
  assert peak_of_devices("mine", mine, 4) == 12e12


def test_devices_share_what_a_chip_has():
  v3 = hardware_of("tpu_v3")
  device = share_chip(v3, 2)
  assert device.chip_memory_bytes == 16 * 2**30
  assert device.chip_bfloat16_flops == 61.5e12
  assert (device.chip_devices, device.chip_link_dims) == (1, 2)
  assert device.chip_dcn_bandwidth is None
  assert peak_of_devices("tpu_v3", v3, 8) == 4 * 123e12
