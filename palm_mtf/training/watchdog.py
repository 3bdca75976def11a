# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The watchdog ends a hanging run: prints all stacks, and exits with code 1."""

import faulthandler
import logging
import os
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger(__name__)


# WATCHDOG_SECS is multiplied by this for the first step, which compiles, for a
# checkpoint and for a validation loss.
_SLOW_FACTOR = 10
_TICKS = 20  # per WATCHDOG_SECS
_STDERR = 2


class Watchdog:
  """Ends the process if a step takes too long; a context manager."""

  def __init__(self, secs: float | None, newest: Callable[[], str]):
    """Takes WATCHDOG_SECS; if it is None, the watchdog does nothing.

    `newest` returns the path of the newest checkpoint.
    """
    self._secs, self._newest = secs, newest
    self.expect_slow()
    self._where = "before the first step"
    self._end = threading.Event()
    # A thread runs even while the main thread waits in Python or C++.
    self._thread = threading.Thread(target=self._watch, daemon=True)

  def __enter__(self) -> "Watchdog":
    if self._secs is not None:
      self._thread.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._end.set()
    if self._secs is not None:
      self._thread.join()

  def note_step(self, step: int) -> None:
    """Restarts the time limit, for the step after `step`."""
    self._where = f"after step {step}"
    self._waited, self._patience = 0.0, self._secs or 0

  def expect_slow(self) -> None:
    """Restarts the time limit, for something that takes longer than a step."""
    self._waited, self._patience = 0.0, (self._secs or 0) * _SLOW_FACTOR

  def _watch(self) -> None:
    tick = self._secs / _TICKS
    while True:
      start = time.monotonic()
      if self._end.wait(tick):
        return
      # Count a much longer tick only in part: the process was suspended, by
      # Ctrl-Z or because the machine slept.
      self._waited += min(time.monotonic() - start, 2 * tick)
      if self._waited > self._patience:
        self._end_process()

  def _end_process(self) -> None:
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    _logger.error(
      f"no step was done for {self._waited:,.0f} seconds (WATCHDOG_SECS = "
      f"{self._secs:,}), {self._where}; the newest checkpoint is "
      f"{self._newest()}; above is what each thread was doing; run the same "
      "command to resume"
    )
    os._exit(1)  # the main thread hangs, and cannot exit normally
