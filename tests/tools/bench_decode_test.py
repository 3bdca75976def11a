# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The decoding benchmark runs ours, and compares the fastest, pair by pair."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tools import bench_decode

SCRIPT = pathlib.Path(bench_decode.__file__)


def run(*flags):
  return subprocess.run(
    [sys.executable, str(SCRIPT), *flags],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )


def runs_of(*speeds):
  return [{"tokens_per_sec": speed} for speed in speeds]


def test_ratio_is_the_median_of_the_pairs_of_the_fastest_dtypes():
  (record,) = bench_decode.compare(
    {
      ("ours", "int8"): runs_of(6, 8, 9),
      ("ours", "float32"): runs_of(1, 1, 99),
      ("torch", "bfloat16"): runs_of(3, 5, 3),
      ("torch", "float32"): runs_of(1, 2, 1),
    }
  )
  assert (record["dtype"], record["peer_dtype"]) == ("int8", "bfloat16")
  assert record["ratio"] == 2
  assert (record["ratio_min"], record["ratio_max"]) == (1.6, 3)
  assert (record["tokens_per_sec"], record["peer_tokens_per_sec"]) == (8, 3)


@pytest.mark.slow
def test_ours_decodes_and_prints_its_speed_and_share_of_the_bandwidth():
  done = run(
    "--json",
    "--rounds=1",
    "--repeats=1",
    "--dtype=int8",
    "--sequence_length=16",
  )
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout)
  assert record["tokens_per_sec"] > 0
  assert 0 < record["bandwidth_share"] < 5
  assert record["dtype"] == "int8"


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--peer=troch", "--peer = 'troch' (did you mean \"torch\"?)"),
    ("--dtype=float16", "choose one of 'int8', 'bfloat16', 'float32'"),
    ("--rounds=0", "--rounds = 0: give a whole number of at least 1"),
  ],
)
def test_wrong_flag_is_one_line_before_any_work(flag, message):
  done = run(flag)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert message in line
