# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mean seconds of a part of a training step."""

import contextlib
import time
from collections.abc import Iterator


class Clock:
  """Seconds of a part of a step."""

  def __init__(self):
    self._is_first = True
    self._secs: list[float] = []  # [steps] since the last mean
    self.num_steps, self.total_secs = 0, 0.0  # of all steps that were timed

  @contextlib.contextmanager
  def running(self, num_steps: int = 1) -> Iterator[None]:
    """Times the body, which runs `num_steps` steps."""
    start = time.perf_counter()
    yield
    if not self._is_first:  # the first call compiles, and opens files
      secs = time.perf_counter() - start
      self._secs += [secs / num_steps] * num_steps
      self.num_steps += num_steps
      self.total_secs += secs
    self._is_first = False

  def take_mean(self) -> float:
    """Returns the mean since the last call, 0 if nothing was timed."""
    mean = sum(self._secs) / len(self._secs) if self._secs else 0.0
    self._secs = []
    return mean
