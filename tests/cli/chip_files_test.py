# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""CHIP names a file, whose values what the user sets overrides."""

import os
import pathlib

import pytest

from palm_mtf.cli import gin_files
from palm_mtf.cli.chip_files import chip_settings
from palm_mtf.machine.cache_folder import measured_hardware, write_cached
from tests import processes

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


@pytest.fixture
def measured(tmp_path, monkeypatch):
  """The file of this machine's rates."""
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  write_cached(measured_hardware(), b"CHIP_MEMORY_BANDWIDTH = 2e10\n")
  assert hardware().chip_memory_bandwidth == 2e10
  return pathlib.Path(measured_hardware())


@pytest.mark.parametrize(
  "content",
  [b"", bytes(30), b"CHIP_MEMORY_BAND", b"\xff\xfe", b"X = 1 = 2", b"@@("],
)
def test_a_damaged_file_of_rates_ends_no_command(content, measured, caplog):
  measured.write_bytes(content)
  assert hardware().chip_memory_bandwidth is None
  if content:
    (line,) = caplog.messages
    assert line.startswith(f"{measured} does not hold measured rates (")
    assert line.endswith("measure them again: palm_mtf plan --calibrate")


def test_rates_of_another_user_are_not_read(measured, monkeypatch, caplog):
  monkeypatch.setattr(os, "geteuid", lambda: 12345)
  assert hardware().chip_memory_bandwidth is None
  (line,) = caplog.messages
  assert "palm_mtf belongs to another user; set XDG_CACHE_HOME" in line


def test_rates_that_others_may_write_are_not_read(measured, caplog):
  measured.chmod(0o666)
  assert hardware().chip_memory_bandwidth is None
  assert f"other users may write {measured}; remove it" in caplog.text


_READS = """
import os, sys
from palm_mtf.cli.chip_files import chip_settings
os.setuid(65534)
print(chip_settings("measured"))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_a_cache_that_may_not_be_searched_is_like_none(measured, tmp_path):
  tmp_path.chmod(0o700)
  run = processes.python("-c", _READS)
  assert (run.returncode, run.stdout) == (0, "{}\n"), run.stderr


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
