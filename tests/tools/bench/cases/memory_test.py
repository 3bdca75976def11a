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
