# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One function over many batches, by as many processes as there are cores.

Results come in the order of the batches. What a caller reads from files it
reads itself: so any corpus keeps all cores busy, even one file.
"""

import collections
import contextlib
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from palm_mtf.console import configure_logging
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

_BATCHES_BEFORE_PROCESSES = 16  # done here: starting processes takes longer

_work: Callable[[Any], Any]  # of a worker process


def num_cores() -> int:
  """Returns the number of cores that this process may use."""
  return len(os.sched_getaffinity(0))


class WorkerPool:
  """Applies a function to batches; keeps its processes between two calls.

  Use it as a context manager, which ends the processes.
  """

  def __init__(
    self,
    work: Callable[[Any], Any],
    start_work: Callable[[], Callable[[Any], Any]],
    *,
    when_killed: str,
    num_processes: int | None = None,
  ):
    """Readies a pool.

    Args:
      work: function of a batch, for this process.
      start_work: function that a worker calls once, which returns the worker's
        function of a batch.
      when_killed: error of a worker process that was killed.
      num_processes: number of workers; one a core by default, 0 for none.
    """
    self._work, self._start_work = work, start_work
    self._when_killed = when_killed
    if num_processes is None:
      num_processes = num_cores()
    self._num_processes = num_processes
    self._num_batches = 0
    self._stack = contextlib.ExitStack()
    self._pool: futures.Executor | None = None

  def __enter__(self) -> "WorkerPool":
    return self

  def __exit__(self, *unused: object) -> None:
    self._stack.close()

  def map(self, batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the result of every batch, in order.

    Raises:
      UserError: a worker process was killed.
    """
    # Two batches for each process: none waits for this one, memory is bounded.
    running: collections.deque[futures.Future] = collections.deque()
    try:
      for batch in batches:
        running.append(self._submit(batch))
        if len(running) > 2 * self._num_processes:
          yield running.popleft().result()
      while running:
        yield running.popleft().result()
    except BrokenProcessPool:
      raise UserError(self._when_killed) from None

  def _submit(self, batch: Any) -> futures.Future:
    self._num_batches += 1
    if (
      not self._num_processes or self._num_batches <= _BATCHES_BEFORE_PROCESSES
    ):
      done: futures.Future = futures.Future()
      done.set_result(self._work(batch))
      return done
    try:
      if self._pool is None:
        self._pool = self._start()
      return self._pool.submit(_work_on, batch)
    except OSError as error:
      # No shared memory for their locks, or no process more.
      _logger.warning(
        f"no worker process can be started ({error.strerror}): one core works"
      )
      self._num_processes = 0
      return self._submit(batch)

  def _start(self) -> futures.Executor:
    return self._stack.enter_context(
      futures.ProcessPoolExecutor(
        self._num_processes,
        # A forked process would share locks of this one's threads.
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(self._start_work,),
      )
    )


def _start_worker(start_work: Callable[[], Callable[[Any], Any]]) -> None:
  global _work
  threading.Thread(target=_end_with_parent, daemon=True).start()
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops it
  configure_logging()
  _work = start_work()


def _end_with_parent() -> None:
  # Nothing else tells a worker that its parent was killed.
  multiprocessing.parent_process().join()
  os._exit(1)


def _work_on(batch: Any) -> Any:
  return _work(batch)
