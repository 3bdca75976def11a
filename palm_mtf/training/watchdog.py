# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Ends a run that hangs: stacks of all threads on stderr, then exit code 1.

A thread of its own counts the time since the last finished step, so it works
whatever the main thread waits for, in Python or below. What takes long by its
nature, a first step that compiles, a checkpoint or a validation loss, may take
`_SLOW_FACTOR` times as long. Time in which the whole process was stopped (by
Ctrl-Z, or with the machine) does not count.
"""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)


_SLOW_FACTOR = 10
_LOOKS = 20  # how often it looks within the time that a step may take
_STDERR = 2


class Watchdog:
  """Ends the process when no step is done for too long; a context manager."""

  def __init__(self, secs: float | None, newest: Callable[[], str]):
    """Watches with patience for `secs` seconds; None watches nothing.

    Args:
      secs: WATCHDOG_SECS.
      newest: says where the newest checkpoint is, for the message.
    """
    self._secs, self._newest = secs, newest
    self.expect_slow()
    self._where = "before the first step"
    self._end = threading.Event()
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> "Watchdog":
    if self._secs is not None:
      self._thread.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._end.set()
    if self._secs is not None:
      self._thread.join()

  def step_done(self, step: int) -> None:
    """Notes that `step` steps are done."""
    self._where = f"after step {step}"
    self._waited, self._patience = 0.0, self._secs or 0

  def expect_slow(self) -> None:
    """Gives more time, counted from now, until the next step is done."""
    self._waited, self._patience = 0.0, (self._secs or 0) * _SLOW_FACTOR

  def _watch(self) -> None:
    tick = self._secs / _LOOKS
    while True:
      start = time.monotonic()
      if self._end.wait(tick):
        return
      # A tick that took far longer: the process, this thread too, was stopped.
      self._waited += min(time.monotonic() - start, 2 * tick)
      if self._waited > self._patience:
        self._end_process()

  def _end_process(self) -> None:
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    _logger.error(
      f"no step was done for {self._waited:,.0f} seconds (WATCHDOG_SECS = "
      f"{self._secs:,}), {self._where}; the newest checkpoint is "
      f"{self._newest()}; above is what each thread was doing; run the same "
      "command to go on"
    )
    os._exit(1)  # the main thread may never come back to end it in order
