# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The training benchmark runs ours, and compares pair by pair."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tools import bench_train

SCRIPT = pathlib.Path(bench_train.__file__)


def run(*flags):
  return subprocess.run(
    [sys.executable, str(SCRIPT), *flags],
    capture_output=True,
    text=True,
    env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
  )


def test_ratio_is_the_median_of_the_pairs_not_of_the_speeds():
  (record,) = bench_train.compare({"ours": [6, 8, 9], "torch": [3, 5, 3]})
  assert record["ratio"] == 2
  assert (record["ratio_min"], record["ratio_max"]) == (1.6, 3)
  assert (record["tokens_per_sec"], record["peer_tokens_per_sec"]) == (8, 3)


@pytest.mark.slow
def test_ours_trains_the_model_it_says_and_prints_its_speed():
  done = run("--json", "--rounds=1", "--steps=1", "--dtype=float32")
  assert done.returncode == 0, done.stderr
  record = json.loads(done.stdout)
  assert record["tokens_per_sec"] > 0
  assert record["dtype"] == "float32"


@pytest.mark.parametrize(
  "flag, message",
  [
    ("--peer=troch", "--peer = 'troch' (did you mean \"torch\"?)"),
    ("--dtype=float16", "choose one of 'bfloat16', 'float32'"),
    ("--steps=0", "--steps = 0: give a whole number of at least 1"),
  ],
)
def test_wrong_flag_is_one_line_before_any_work(flag, message):
  done = run(flag)
  assert done.returncode == 2
  (line,) = done.stderr.splitlines()
  assert message in line
