# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Applies a function to many batches, in one worker process per core.

Results come in the order of the batches. The calling process reads the files,
so that even a corpus of a single file keeps all cores busy.
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
from typing import Any, TypeVar

from palm_mtf.console import configure_logging
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)
_Item = TypeVar("_Item")

# The calling process applies the function to the first 16 batches itself: for
# so few batches, it would take longer to start workers.
_BATCHES_BEFORE_PROCESSES = 16


def num_cores() -> int:
  """Returns how many cores this process may use; a worker may use only one."""
  is_worker = multiprocessing.parent_process() is not None
  return 1 if is_worker else len(os.sched_getaffinity(0))


def gather(
  items: Iterable[_Item], size_of: Callable[[_Item], int], batch_size: int
) -> Iterator[list[_Item]]:
  """Groups items into batches, which end when sizes sum to `batch_size`."""
  batch: list[_Item] = []
  size = 0
  for item in items:
    batch.append(item)
    size += size_of(item)
    if size >= batch_size:
      yield batch
      batch, size = [], 0
  if batch:
    yield batch


class WorkerPool(contextlib.ExitStack):
  """Applies a function to batches in processes that persist between calls.

  Use it as a context manager, so that the processes end.
  """

  # ProcessPoolExecutor is not used, because its processes share a queue: if a
  # worker is killed while it writes a result, readers of the queue wait
  # forever; if the calling process is killed, the workers wait forever.

  def __init__(
    self,
    work: Callable[[Any], Any],
    *,
    when_killed: str,
    num_processes: int | None = None,
  ):
    """Prepares a pool.

    Args:
      work: function that maps a batch to its result; sent pickled to workers.
      when_killed: message of the error if a worker process is killed.
      num_processes: number of workers; None for one per core. With 0, the
        calling process applies `work`.
    """
    super().__init__()
    self._work, self._when_killed = work, when_killed
    self._num_processes = (
      num_cores() if num_processes is None else num_processes
    )
    self._num_batches = 0
    self._threads: futures.Executor | None = None
    self._idle: queue.SimpleQueue[Connection] = queue.SimpleQueue()

  def map(self, batches: Iterable[Any]) -> Iterator[Any]:
    """Yields the result of every batch, in order.

    Raises UserError if a worker process was killed.
    """
    # Keep about two batches per worker in flight, so that no worker waits for
    # the caller and memory is bounded.
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
        return self._threads.submit(self._ask_worker, batch)
      except OSError as error:  # the system's limit of processes or open files
        _logger.warning(
          f"no worker process can be started ({error.strerror}): one core works"
        )
        self._num_processes = 0
    done: futures.Future = futures.Future()
    done.set_result(self._work(batch))
    return done

  def _start(self) -> futures.Executor:
    """Starts workers; returns a pool of threads that wait for their results."""
    # Spawn workers, because a forked process would inherit locks that threads
    # of this process hold.
    context = multiprocessing.get_context("spawn")
    for _ in range(self._num_processes):
      # Every worker has its own pipe. Only the worker holds `there`, so that
      # the pipe closes if the worker is killed, even while it writes.
      here, there = context.Pipe()
      with there:
        process = context.Process(
          target=_serve_batches, args=(there, self._work), daemon=True
        )
        process.start()
      self.callback(process.join)
      self.callback(here.close)  # a closed pipe ends the worker
      self._idle.put(here)
    threads = futures.ThreadPoolExecutor(self._num_processes)
    self.callback(threads.shutdown, cancel_futures=True)
    return threads

  def _ask_worker(self, batch: Any) -> Any:
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


def _serve_batches(client: Connection, work: Callable[[Any], Any]) -> None:
  """Runs in a worker; answers batches until the caller closes its pipe."""
  signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C
  configure_logging()
  # The pipe may close between two messages (EOFError) or within one (OSError).
  with contextlib.suppress(EOFError, OSError):
    while True:
      batch = client.recv()
      try:
        answer = work(batch), None
      except Exception as error:
        # Add the traceback for the caller, because pickling an error drops it.
        error.add_note(traceback.format_exc())
        answer = None, error
      client.send(answer)
