# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs palm_mtf with a slow disk, or with a clock that jumps.

  python -m tools.disturbed "slow disk,clock jump" SEED train --gin_file=...

Python's functions are slow or wrong: fsync and renames take up to 0.1 seconds
longer, and the time of day jumps by up to a year, every two seconds or more
often.
"""

import os
import random
import sys
import time
import types
from collections.abc import Callable
from typing import Any

import grpc._channel

from palm_mtf.cli.main import main

SLOW_DISK, CLOCK_JUMP = "slow disk", "clock jump"
_MOST_SECS = 0.1
_YEAR_SECS = 3e7


def _slow_down(function: Callable[..., Any], rng: random.Random):
  def call(*arguments: Any, **keywords: Any) -> Any:
    time.sleep(rng.uniform(0, _MOST_SECS))
    return function(*arguments, **keywords)

  return call


class _Clock:
  """A time of day that jumps."""

  def __init__(self, rng: random.Random):
    self._rng, self._right = rng, time.time
    self._until = self._offset = 0.0

  def time(self) -> float:
    """Returns seconds since some epoch."""
    now = time.monotonic()
    if now >= self._until:
      self._until = now + self._rng.uniform(0, 2)
      self._offset = self._rng.uniform(-_YEAR_SECS, _YEAR_SECS)
    return self._right() + self._offset

  def time_ns(self) -> int:
    """Returns nanoseconds since some epoch."""
    return int(self.time() * 1e9)


def disturb(kinds: str, seed: int) -> None:
  """Makes Python's disk slow, its clock jump, or both, in this process."""
  rng = random.Random(seed)
  if SLOW_DISK in kinds:
    for name in ("fsync", "replace", "rename"):
      setattr(os, name, _slow_down(getattr(os, name), rng))
  if CLOCK_JUMP in kinds:
    # Give gRPC the real clock: it computes deadlines with Python's clock, but
    # for C++ code, whose clock does not jump.
    calm = types.ModuleType("time")
    vars(calm).update(vars(time))
    grpc._channel.time = calm
    clock = _Clock(rng)
    time.time, time.time_ns = clock.time, clock.time_ns


if __name__ == "__main__":
  disturb(sys.argv[1], int(sys.argv[2]))
  sys.exit(main(sys.argv[3:]))
