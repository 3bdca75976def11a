# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Times the steps of a run, shows its progress on stderr, ends it if it hangs.

A terminal shows a bar with step, loss, tokens/s, MFU and remaining time. A file
or a pipe gets these values in log lines, one every 10 seconds.
"""

import contextlib
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator

from rich import progress
from rich.console import Console

from palm_mtf.config import RunConfig

_logger = logging.getLogger(__name__)

_LINE_SECS = 10.0
# A validation loss takes only the forward pass, a third of a step's FLOPs.
_STEPS_OF_A_LOSS = 1 / 3


class Clock:
  """Measures the mean seconds of a part of a step, such as reading data."""

  def __init__(self):
    self._is_first = True
    self._secs: list[float] = []  # of each timed step since the last mean
    self.num_steps, self.total_secs = 0, 0.0  # of all timed steps

  @contextlib.contextmanager
  def running(self, num_steps: int = 1) -> Iterator[None]:
    """Times the `with` body, which runs `num_steps` steps."""
    start = time.perf_counter()
    yield
    if not self._is_first:  # not the first call: it compiles, and opens files
      secs = time.perf_counter() - start
      self._secs += [secs / num_steps] * num_steps
      self.num_steps += num_steps
      self.total_secs += secs
    self._is_first = False

  def take_mean(self) -> float:
    """Returns mean seconds per step since the previous call; 0.0 if none."""
    mean = sum(self._secs) / len(self._secs) if self._secs else 0.0
    self._secs = []
    return mean


def count_rows_left(run: RunConfig, step: int) -> float:
  """Returns the work left after `step` steps, in units of a training row."""
  sizes = run.batch_sizes
  rows = sizes.rows_before(run.train_steps) - sizes.rows_before(step)
  # Validation losses are measured every EVAL_STEPS and after the last step.
  losses = -(-run.train_steps // run.eval_steps) - step // run.eval_steps
  return rows + losses * run.num_validation_rows * _STEPS_OF_A_LOSS


def _format_minutes(secs: float) -> str:
  return f"{int(secs) // 60}:{int(secs) % 60:02d}"


class TrainProgress:
  """Shows the progress of training; a context manager."""

  def __init__(self, step: int, train_steps: int):
    self._train_steps = train_steps
    self._last_line = time.monotonic()
    # Step and time of the first `update`. The remaining time is estimated from
    # the steps after it, because the time before it went mostly into compiling.
    self._first: tuple[int, float] | None = None
    self._has_predicted = False
    self._bar = progress.Progress(
      progress.TextColumn("step {task.completed}/{task.total}"),
      progress.BarColumn(),
      progress.TextColumn("{task.fields[numbers]}"),
      progress.TimeElapsedColumn(),
      progress.TextColumn("{task.fields[left]}"),
      console=Console(stderr=True),
      disable=not sys.stderr.isatty(),
    )
    self._task = self._bar.add_task(
      "", total=train_steps, completed=step, numbers="compiling ...", left=""
    )

  def __enter__(self) -> "TrainProgress":
    self._bar.start()
    return self

  def __exit__(self, *unused: object) -> None:
    self._bar.stop()

  def update(
    self,
    step: int,
    *,
    loss: float,
    tokens_per_sec: float,
    mfu: float | None,
    accuracy: float | None = None,
  ) -> None:
    """Shows that `step` steps are done, with the last step's metrics.

    `mfu` is None if it is not known, `accuracy` if the run learns no pairs.
    """
    numbers = f"loss {loss:.3f}"
    if accuracy is not None:
      numbers += f"  accuracy {accuracy:.0%}"
    if tokens_per_sec:
      numbers += f"  {tokens_per_sec:,.0f} tokens/s"
    if tokens_per_sec and mfu is not None:
      numbers += f"  MFU {mfu:.1%}"
    now = time.monotonic()
    left = self._estimate_left(step, now)
    self._bar.update(self._task, completed=step, numbers=numbers, left=left)
    is_due = now - self._last_line >= _LINE_SECS or step == self._train_steps
    if self._bar.disable and is_due:
      self._last_line = now
      line = f"step {step}/{self._train_steps}  {numbers}  {left}"
      _logger.info(line.rstrip())

  def _estimate_left(self, step: int, now: float) -> str:
    """Returns the remaining time as text; "" while it is unknown."""
    steps_left = self._train_steps - step
    if not steps_left:
      return "0:00 left"
    if self._first is None or step <= self._first[0]:  # no step timed
      self._first = step, now
      return ""
    first_step, start = self._first
    secs = (now - start) / (step - first_step) * steps_left
    return f"{_format_minutes(secs)} left"

  def predict_time(self, step_secs: float, secs: float) -> None:
    """Logs the seconds per step, and the `secs` left, but only once."""
    if not self._has_predicted:
      self._has_predicted = True
      _logger.info(
        f"training will take about {_format_minutes(secs)} minutes on this "
        f"machine: {step_secs:.2f} s per step, and validation losses"
      )


# WATCHDOG_SECS is multiplied by this for slow work, such as the first step,
# which compiles, a checkpoint, or a validation loss.
_SLOW_FACTOR = 10
_TICKS = 20  # checks of the time per WATCHDOG_SECS, so at most 5% too late
_STDERR = 2


class Watchdog:
  """Ends the process if a step hangs, so that its user can resume the run."""

  def __init__(self, secs: float | None, newest: Callable[[], str]):
    """Takes WATCHDOG_SECS; if it is None, the watchdog does nothing.

    `newest` returns the path of the newest checkpoint, for the message.
    """
    self._secs, self._newest = secs, newest
    self.expect_slow()
    self._where = "before the first step"
    self._end = threading.Event()
    # A thread can check the time even while the main thread hangs.
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
    """Restarts the time limit, ten times as long, for work like saving."""
    self._waited, self._patience = 0.0, (self._secs or 0) * _SLOW_FACTOR

  def _watch(self) -> None:
    tick = self._secs / _TICKS
    while True:
      start = time.monotonic()
      if self._end.wait(tick):
        return
      # Count at most two ticks: a longer wait means that the process was
      # suspended, by Ctrl-Z or because the machine slept.
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
