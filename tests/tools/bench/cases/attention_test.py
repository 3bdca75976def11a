# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The bench compares ways to attend with all positions at once."""

import json

import pytest


@pytest.mark.slow  # six processes
def test_it_gives_the_speed_up_of_each_size_with_weights_kept_and_not(
  run_bench,
):
  flags = ["--length=24", "--blocks=8", "--rounds=3", "--json"]
  code, out, _ = run_bench("attention", *flags)
  assert code == 0
  records = list(map(json.loads, out.splitlines()))
  assert [(x["block"], x["weights"]) for x in records] == [
    ("C++", "made again"),
    (8, "kept"),
    (8, "made again"),
  ]
  for record in records:
    assert record["length"] == 24
    assert 0 < record["low"] <= record["median"] <= record["high"]


def test_blocks_that_are_no_numbers_are_refused(run_bench):
  assert run_bench("attention", "--blocks=few")[::2] == (
    2,
    "bench attention: --blocks = few: give numbers, as in 64,128.\n",
  )
