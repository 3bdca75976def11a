# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Comparisons run ours, and compare the fastest dtypes pair by pair."""

import json

import pytest

from tests import processes
from tools import bench_peers


def runs_of(*speeds):
  return [{"tokens_per_sec": speed} for speed in speeds]


def test_ratio_is_the_median_of_the_pairs_of_the_fastest_dtypes():
  (record,) = bench_peers.compare(
    {
      ("ours", "int8"): runs_of(6, 8, 9),
      ("ours", "float32"): runs_of(1, 1, 99),
      ("torch", "bfloat16"): runs_of(3, 5, 3),
      ("torch", "float32"): runs_of(1, 2, 1),
    }
  )
  assert (record["dtype"], record["peer_dtype"]) == ("int8", "bfloat16")
  assert record["ratio"] == 2  # of the speeds it would be 8 / 3
  assert (record["ratio_min"], record["ratio_max"]) == (1.6, 3)
  assert (record["tokens_per_sec"], record["peer_tokens_per_sec"]) == (8, 3)


@pytest.mark.slow
@pytest.mark.parametrize(
  ("tool", "flags"),
  [
    ("bench_train", ["--steps=1", "--dtype=float32"]),
    ("bench_decode", ["--repeats=1", "--dtype=int8", "--sequence_length=16"]),
  ],
)
def test_ours_runs_the_model_it_says_and_prints_its_speed(tool, flags):
  script = processes.ROOT / "tools" / f"{tool}.py"
  done = processes.python(script, "--json", "--rounds=1", *flags)
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout)
  assert record["tokens_per_sec"] > 0
  assert f"--dtype={record['dtype']}" in flags
  if tool == "bench_decode":
    assert 0 < record["bandwidth_share"] < 5
