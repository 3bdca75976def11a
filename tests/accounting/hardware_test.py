# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Peaks are the vendors' figures; an unknown chip is named, never guessed."""

import pytest

from palm_mtf.accounting.hardware import check_chip, peak_flops_per_sec
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("chip", "tera_flops_per_sec"),
  [
    ("tpu_v2", 45),
    ("tpu_v3", 123),
    ("tpu_v4", 275),
    ("tpu_v5e", 197),
    ("tpu_v5p", 459),
    ("tpu_v6e", 918),
    ("v100", 125),
    ("a100", 312),
    ("h100_sxm", 989.4),
    ("h200", 989.4),
  ],
)
def test_the_peak_is_the_data_sheets(chip, tera_flops_per_sec):
  assert peak_flops_per_sec(chip) == tera_flops_per_sec * 1e12
  check_chip(chip)


def test_an_unknown_chip_is_refused_with_the_nearest_name_and_the_list():
  with pytest.raises(UserError) as error:
    check_chip("tpu_v4i")
  assert str(error.value) == (
    "CHIP = 'tpu_v4i' (did you mean \"tpu_v4\"?): its peak FLOP/s is not "
    "known. Choose one of 'measured', 'tpu_v2', 'tpu_v3', 'tpu_v4', 'tpu_v5e', "
    "'tpu_v5p', 'tpu_v6e', 'v100', 'a100', 'h100_sxm', 'h200'."
  )


@pytest.mark.parametrize("chip", ["measured", None, 3])
def test_only_a_chip_of_the_table_has_a_peak(chip):
  check_chip("measured")  # the rate of this machine
  with pytest.raises(UserError, match=r"Choose one of 'measured', 'tpu_v2'"):
    peak_flops_per_sec(chip)
