# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Ratios are medians over rounds, without disturbed rounds."""

import sys

import numpy as np
import pytest

from palm_mtf.errors import UserError
from tools.bench.pairs import (
  MIN_ROUNDS,
  Program,
  Turn,
  alternate,
  ratio,
  speed_records,
  speeds_row,
)

SLEEPER = """
import sys, time
sys.path.insert(0, "tools/peers")
from turns import take_turns
def turn():
  time.sleep(float(sys.argv[1]))
  return {"value": 7.0}
take_turns(turn, {"name": sys.argv[1]})
"""


def turns(secs, others=0.0):
  return [Turn(x, others, {}) for x in secs]


def test_the_ratio_is_the_median_of_rounds_not_of_times():
  """A machine that slows down changes both programs alike."""
  slow = np.geomspace(1, 100, MIN_ROUNDS)
  found = ratio(turns(3 * slow), turns(2 * slow))
  assert found.median == pytest.approx(1.5)
  assert (found.rounds, found.left_out) == (MIN_ROUNDS, 0)


def test_disturbed_rounds_are_left_out_while_enough_are_left():
  quiet, disturbed = turns([2.0] * MIN_ROUNDS), turns([9.0] * 5, others=0.2)
  found = ratio(quiet + disturbed, turns([1.0] * (MIN_ROUNDS + 5)))
  assert (found.median, found.high, found.left_out) == (2.0, 2.0, 5)
  assert not found.is_disturbed
  found = ratio(quiet[1:] + disturbed, turns([1.0] * (MIN_ROUNDS + 4)))
  assert (found.rounds, found.is_disturbed) == (MIN_ROUNDS + 4, True)


def test_the_interval_has_the_median_in_95_of_100_series():
  rng = np.random.default_rng(0)
  hits = 0
  for _ in range(1000):
    found = ratio(turns(rng.lognormal(size=40)), turns([1.0] * 40))
    hits += found.low <= 1.0 <= found.high
  assert 930 <= hits <= 985


def test_ratios_are_of_seconds_and_above_1_where_ours_is_faster():
  seconds = {("ours", "int8"): (1, 2, 4), ("a", "q8_0"): (3, 4, 8)}
  found = speed_records(
    {
      name: [Turn(x, 0.0, {"peak_bytes": 1e6 * x}) for x in secs]
      for name, secs in seconds.items()
    },
    100,
  )
  assert [x["tokens_per_sec"] for x in found] == [50, 25]
  assert "ratio" not in found[0] and found[1]["ratio"] == 2  # of 3, 2 and 2
  ours, theirs = map(speeds_row, found)
  assert ours.split() == ["ours", "int8", "50", "4"]
  assert theirs.split()[:5] == ["a", "q8_0", "25", "8", "2.00"]


def test_programs_take_turns():
  command = [sys.executable, "-c", SLEEPER]
  with (
    Program("a", [*command, "0.05"]) as a,
    Program("b", [*command, "0"]) as b,
  ):
    assert (a.facts, b.facts) == ({"name": "0.05"}, {"name": "0"})
    seen = alternate([a, b], 4)
    assert all(turn.secs >= 0.05 > 0 for turn in seen["a"])
    assert {turn.values["value"] for turn in seen["b"]} == {7.0}
    assert all(turn.values["peak_bytes"] > 1e6 for turn in seen["b"])


@pytest.mark.parametrize(
  ("code", "flags", "message"),
  [
    ("pass", [], "^c ended with code 0 while it warmed up; its messages"),
    (
      "import os; os.kill(os.getpid(), 11)",
      ["--bits=8", "--model=/x/y.gguf"],
      "^c ended by SIGSEGV while it read /x/y.gguf; its messages, if any",
    ),
  ],
)
def test_a_program_that_ends_is_reported_with_its_signal(code, flags, message):
  with pytest.raises(UserError, match=message):
    Program("c", [sys.executable, "-c", code, *flags])
