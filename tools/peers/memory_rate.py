# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads memory with all cores; a turn is many passes over an array.

python memory_rate.py
"""

# A decoding step of one text takes at least as long as memory takes to give all
# weights. The loop finds the largest number of each part of an array that no
# cache holds; a thread that has ended a part takes the next, so that no core
# waits. The array is in pages of 2 MiB, as our weights are. A loop in C with
# registers of 512 bits, with or without prefetches, reads at most 3% faster.
# Needs numpy. tools/bench starts it.

import concurrent.futures
import contextlib
import mmap
import os
import time

import numpy as np
from turns import take_turns

_BYTES, _PARTS, _PASSES = 2**29, 8, 24
_COLLAPSE = 25  # MADV_COLLAPSE, since Linux 6.1


def main() -> None:
  """Takes turns."""
  threads = os.cpu_count()
  memory = mmap.mmap(-1, _BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
  parts = np.frombuffer(memory, np.uint64).reshape(_PARTS, -1)
  parts[:] = 1
  with contextlib.suppress(OSError):
    memory.madvise(_COLLAPSE)
  with concurrent.futures.ThreadPoolExecutor(threads) as pool:

    def turn() -> dict[str, float]:
      start = time.perf_counter()
      for _ in pool.map(np.max, [*parts] * _PASSES):
        pass
      secs = time.perf_counter() - start
      return {"secs": secs, "read_bytes": _PASSES * _BYTES}

    turn()  # warms up
    take_turns(turn, {})


if __name__ == "__main__":
  main()
