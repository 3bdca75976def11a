# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory does not grow with repetitions; the table has the sizes."""

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


def test_growth_is_from_the_tenth_time_to_the_last(monkeypatch, measure):
  measured = []

  def measure_apart(case, kind, times):
    measured.append((kind, times))
    return [100_000_000] * 10 + [101_500_000] * (times - 10)

  monkeypatch.setattr(command, "measure_apart", measure_apart)
  flags = ["--only=rewinds", "--only=samples", "--times=40"]
  records = measure("memory", *flags)
  assert [x["growth"] for x in records] == [0.015, 0.015]
  assert measured == [("rewinds", 40), ("samples", 40)]
  cells = ["rewinds", "40", "100.0", "100.0", "101.5", "101.5", "1.50%"]
  assert memory.row(records[0]).split() == cells
