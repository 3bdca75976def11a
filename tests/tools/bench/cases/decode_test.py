# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A step's reading is compared with a loop's in the same rounds."""

import pytest

from tools.bench.cases.decode import HEAD, Task, memory_fields, row
from tools.bench.pairs import Turn


def turns(secs, read_bytes):
  return [Turn(x, 0.0, {"read_bytes": read_bytes}) for x in secs]


def test_the_share_is_of_what_memory_gave_in_the_same_round():
  """The machine is twice as slow in the last two of three rounds."""
  task = Task("4.8M", sequence_length=16, batch_size=4)
  found = memory_fields(
    task, turns([2.0, 4.0, 4.0], 11 * 5e9), turns([1.0, 2.0, 2.0], 40e9)
  )
  assert found == {
    "step_bytes": 5e9,  # a turn has 16 - 4 - 1 steps, for all four texts
    "read_bytes_per_sec": pytest.approx(13.75e9),
    "memory_bytes_per_sec": pytest.approx(20e9),
    "memory_share": pytest.approx(0.6875),
  }
  record = {"program": "ours", "dtype": "int8", "tokens_per_sec": 7.0}
  line = row({**record, "peak_bytes": 3e6, **found})
  assert line.split() == ["ours", "int8", "7", "3", "5,000", "13.8", "0.69"]
  head = HEAD.splitlines()[1]
  assert line.index("0.69") + 4 == head.index("share") + len("share")
