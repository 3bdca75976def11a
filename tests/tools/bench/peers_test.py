# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparisons run palm_mtf, and report the speeds of all programs."""

import json

import pytest

from tests import processes
from tools.bench.pairs import Turn, speed_records, speeds_row


def turns(*secs):
  return [Turn(x, 0.0, {"peak_bytes": 1e6 * x}) for x in secs]


def test_ratios_are_of_seconds_and_above_1_where_ours_is_faster():
  found = speed_records(
    {("ours", "int8"): turns(1, 2, 4), ("a", "q8_0"): turns(3, 4, 8)}, 100
  )
  assert [x["tokens_per_sec"] for x in found] == [50, 25]
  assert "ratio" not in found[0]
  assert found[1]["ratio"] == 2  # of 3, 2 and 2
  ours, theirs = map(speeds_row, found)
  assert ours.split() == ["ours", "int8", "50", "4"]
  assert theirs.split()[:5] == ["a", "q8_0", "25", "8", "2.00"]


@pytest.mark.slow
@pytest.mark.parametrize(
  ("case", "flags"),
  [
    ("train", ["--size=4.8M", "--dtype=float32"]),
    ("decode", ["--bits=8", "--sequence_length=16"]),
  ],
)
def test_ours_runs_and_says_its_speed(case, flags):
  bench = processes.ROOT / "tools" / "bench"
  done = processes.python(bench, case, "--json", "--rounds=1", *flags)
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout)
  assert record["program"] == "ours"
  assert record["tokens_per_sec"] > 0
  assert 1e8 < record["peak_bytes"] < 2e9
