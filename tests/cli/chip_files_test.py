# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""CHIP names a file, whose values what the user sets overrides."""

import pytest

from palm_mtf.cli import gin_files
from palm_mtf.cli.chip_files import chip_settings
from palm_mtf.machine.cache_folder import measured_hardware

RECIPE, DIR = "recipes/quickstart.gin", 'MODEL_DIR="x"'


def loaded(*given):
  return gin_files.load("train", [RECIPE], [DIR, *given])


def hardware(*given):
  return loaded(*given).build()[1].hardware


def test_a_chip_brings_its_rates_and_the_user_has_the_last_word():
  assert hardware('CHIP="tpu_v4"').chip_watts == 378.5
  mine = hardware('CHIP="tpu_v4"', "CHIP_WATTS=500")
  assert (mine.chip_watts, mine.chip_memory_bytes) == (500, 32 * 2**30)


def test_another_chip_over_a_runs_config_brings_its_own_rates(tmp_path):
  """What followed from the first is a comment in config.gin."""
  text = loaded('CHIP="tpu_v4"', "CHIP_WATTS=500").effective_text()
  file = tmp_path / "config.gin"
  file.write_text(text)
  again = gin_files.load("train", [str(file)], ['CHIP="a100"']).build()[1]
  assert again.hardware.chip_bfloat16_flops == 312e12
  assert again.hardware.chip_watts == 500
  assert "# CHIP_MEMORY_BYTES = 34359738368  # hardware/tpu_v4.gin" in text


@pytest.mark.parametrize("chip", ["../models/palm_8b", "nochip", 3, None, ""])
def test_what_names_no_file_brings_nothing(chip):
  assert chip_settings(chip) == {}


def test_the_measured_rates_are_this_machines(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  assert hardware().chip_memory_bandwidth is None
  path = tmp_path / "palm_mtf" / "hardware"
  path.mkdir(parents=True)
  assert measured_hardware().startswith(str(path))
  with open(measured_hardware(), "w") as file:
    file.write("CHIP_MEMORY_BANDWIDTH = 2e10\n")
  assert hardware().chip_memory_bandwidth == 2e10
  # Other cores, other rates.
  monkeypatch.setattr("palm_mtf.machine.cache_folder.usable_cores", lambda: 99)
  assert hardware().chip_memory_bandwidth is None
