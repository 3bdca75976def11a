# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory does not grow with repetitions; the table has the sizes."""

import json

import pytest

from tools.bench import command
from tools.bench.cases import memory

# Enough to show memory that each repetition leaves; docs/ has the full curves.
FEWER = {"samples": 60, "task evaluations": 40, "prompts": 300}


@pytest.mark.slow
@pytest.mark.parametrize("kind", memory.TIMES)
def test_memory_grows_by_less_than_one_percent_after_the_tenth_time(kind):
  times = FEWER.get(kind, memory.TIMES[kind])
  sizes = command.measure_apart("memory", kind=kind, times=times)
  assert len(sizes) == times
  assert max(sizes[-5:]) < 1.01 * sizes[9]


def test_a_row_has_some_sizes_the_last_and_the_growth_after_the_tenth(
  monkeypatch, run_bench
):
  measured = []

  def measure(case, kind, times):
    measured.append((kind, times))
    return [100_000_000] * 10 + [101_500_000] * (times - 10)

  monkeypatch.setattr(command, "measure_apart", measure)
  flags = ["--only=rewinds", "--only=samples"]
  code, out, _ = run_bench("memory", *flags, "--times=40")
  assert code == 0
  head, *rows = out.splitlines()
  assert head.split("times")[1].split() == "1 10 20 50 200 last growth".split()
  cells = ["40", "100.0", "100.0", "101.5", "101.5", "1.50%"]
  assert [row.split() for row in rows] == [
    ["rewinds", *cells],
    ["samples", *cells],
  ]
  assert measured == [("rewinds", 40), ("samples", 40)]
  code, out, _ = run_bench("memory", "--only=rewinds", "--json")
  assert json.loads(out)["growth"] == 0.015
  assert measured[2] == ("rewinds", 20)


def test_fewer_times_than_have_a_growth_are_refused(run_bench):
  code, _, error = run_bench("memory", "--times=9")
  assert code == 2
  assert error.endswith("--times = 9: give a whole number of at least 10.\n")
