# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is hidden and what is exposed, against sums over single microseconds."""

import random

import pytest

from palm_mtf.trace.overlap import (
  measure_received,
  step_figures,
  subtract,
  union,
)
from palm_mtf.trace.records import Operation, Trace, Transfer


def transfer(source, target, ready, arrived, num_bytes=1):
  return Transfer("x", source, target, num_bytes, ready, ready, arrived)


def computing(pod, start, end):
  return Operation(pod, 0, "x", "forward", start, end)


def trace(operations, transfers, num_pods=2):
  return Trace(num_pods, 0.0, operations, transfers, 20.0)


def test_the_example_of_the_docstring_where_only_the_receiver_hides():
  """One column of the drawing is a second; the sender computes throughout."""
  found = measure_received(
    trace(
      [computing(1, 0, 9), computing(1, 15, 25), computing(0, 0, 25)],
      [transfer(0, 1, 6, 12), transfer(0, 1, 18, 22)],
    ),
    1,
  )
  assert found.hidden_secs == 3 + 4
  assert found.exposed == [(9, 12)]
  assert found.exposed_secs == 3


def test_transfers_at_once_and_devices_at_once_count_once():
  operations = [computing(1, 0, 3), computing(1, 2, 4)]
  transfers = [transfer(0, 1, 1, 6, 10), transfer(2, 1, 2, 7, 20)]
  of_all = measure_received(trace(operations, transfers, 3), 1)
  assert (of_all.hidden_secs, of_all.exposed_secs) == (3, 3)
  assert of_all.received_bytes == 30
  of_one = measure_received(trace(operations, transfers, 3), 1, [2])
  assert (of_one.hidden_secs, of_one.exposed) == (2, [(4, 7)])
  assert of_one.received_bytes == 20


def test_figures_are_means_over_pods_and_the_rate_is_that_of_a_pod():
  figures = step_figures(
    trace(
      [computing(1, 0, 4)],
      [transfer(0, 1, 0, 4, 10**9), transfer(1, 0, 4, 8, 10**9)],
    )
  )
  assert figures == {
    "traced_step_secs": 20.0,
    "traced_dcn_bytes": 2 * 10**9,
    "traced_hidden_secs": 2.0,
    "traced_exposed_secs": 2.0,
    "traced_gbits_per_sec": pytest.approx(2.0),
  }


def test_what_takes_no_time_has_no_rate():
  figures = step_figures(trace([], [transfer(0, 1, 3, 3, 8)]))
  assert figures["traced_dcn_bytes"] == 8
  assert figures["traced_hidden_secs"] == figures["traced_exposed_secs"] == 0
  assert "traced_gbits_per_sec" not in figures


def cells(intervals):
  return {i for start, end in intervals for i in range(start, end)}


@pytest.mark.parametrize("seed", range(50))
def test_any_intervals_are_subtracted_as_sets_are(seed):
  rng = random.Random(seed)
  drawn = [
    [(a, a + rng.randrange(8)) for a in rng.choices(range(60), k=12)]
    for _ in range(2)
  ]
  left = subtract(*map(union, drawn))
  assert cells(left) == cells(drawn[0]) - cells(drawn[1])
  assert all(a < b for a, b in left) and left == sorted(left)
