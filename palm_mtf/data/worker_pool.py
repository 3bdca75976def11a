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
import queue
import signal
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from multiprocessing.connection import Connection
from typing import Any

from palm_mtf.console import configure_logging
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)

_BATCHES_BEFORE_PROCESSES = 16  # done here: starting processes takes longer


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
    self._threads: futures.Executor | None = None
    self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()

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
    for batch in batches:
      running.append(self._submit(batch))
      if len(running) > 2 * self._num_processes:
        yield running.popleft().result()
    while running:
      yield running.popleft().result()

  def _submit(self, batch: Any) -> futures.Future:
    self._num_batches += 1
    if self._num_processes and self._num_batches > _BATCHES_BEFORE_PROCESSES:
      try:
        if self._threads is None:
          self._threads = self._start()
        return self._threads.submit(self._ask, batch)
      except OSError as error:  # no process more, or no descriptor
        _logger.warning(
          f"no worker process can be started ({error.strerror}): one core works"
        )
        self._num_processes = 0
    done: futures.Future = futures.Future()
    done.set_result(self._work(batch))
    return done

  def _start(self) -> futures.Executor:
    """Starts the workers; returns as many threads, each to wait for one.

    Every worker has a pipe of its own, whose other end nobody else holds: one
    that is killed in the middle of a result ends the pipe. (A queue that
    workers share would stay locked, and what reads it would wait for ever.)
    """
    # A forked process would share locks of this one's threads.
    context = multiprocessing.get_context("spawn")
    for _ in range(self._num_processes):
      here, there = context.Pipe()
      with there:
        process = context.Process(
          target=_work_for, args=(there, self._start_work), daemon=True
        )
        process.start()
      self._stack.callback(process.join)
      self._stack.callback(here.close)  # which ends the worker
      self._idle.put(here)
    threads = futures.ThreadPoolExecutor(self._num_processes)
    self._stack.callback(threads.shutdown, cancel_futures=True)
    return threads

  def _ask(self, batch: Any) -> Any:
    """Returns the result of a worker that is idle."""
    worker = self._idle.get()
    try:
      worker.send(batch)
      result, error = worker.recv()
    except (EOFError, OSError):
      raise UserError(self._when_killed) from None
    finally:
      self._idle.put(worker)
    if error is not None:
      raise error
    return result


def _work_for(
  client: Connection, start_work: Callable[[], Callable[[Any], Any]]
) -> None:
  """Answers batches until the client closes its end, or is no more."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the client stops it
  configure_logging()
  work = start_work()
  # The end of the pipe, between two messages or in the middle of one.
  with contextlib.suppress(EOFError, OSError):
    while True:
      client.send(_answer(work, client.recv()))


def _answer(
  work: Callable[[Any], Any], batch: Any
) -> tuple[Any, Exception | None]:
  try:
    return work(batch), None
  except Exception as error:
    error.add_note(traceback.format_exc())  # of the worker
    return None, error
