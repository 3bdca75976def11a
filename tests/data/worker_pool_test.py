# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import errno
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from palm_mtf.data import worker_pool
from palm_mtf.data.worker_pool import WorkerPool
from palm_mtf.errors import UserError


def double(batch: int) -> int:
  time.sleep(0.01 * (batch % 3))
  return 2 * batch


def make(num_processes: int, function=double) -> WorkerPool:
  return WorkerPool(
    function, when_killed="was killed.", num_processes=num_processes
  )


@pytest.mark.parametrize("num_processes", [0, 2])
def test_results_come_in_order_and_batches_are_read_two_a_process_ahead(
  num_processes, monkeypatch
):
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 2)
  with make(num_processes) as workers:
    for _ in range(2):
      read = []
      batches = (read.append(each) or each for each in range(20))
      for number, found in enumerate(workers.map(batches)):
        assert found == 2 * number
        assert len(read) <= number + 1 + 2 * num_processes
  assert multiprocessing.active_children() == []


def test_where_no_process_can_be_started_one_core_works_and_that_is_said(
  monkeypatch, capsys
):
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 2)

  def refuse(*unused, **named):
    raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))

  monkeypatch.setattr(multiprocessing.context.SpawnProcess, "start", refuse)
  with make(2) as workers:
    assert [*workers.map(range(20))] == [*range(0, 40, 2)]
  (line,) = capsys.readouterr().err.splitlines()
  assert (
    "no worker process can be started (Resource temporarily unavailable)"
    in line
  )


def be_killed_while_sending(batch: int) -> bytes:
  """Kills the process while it sends a result that fills the pipe."""

  def written() -> int:
    counters = Path("/proc/self/io").read_text().split()
    return int(counters[counters.index("wchar:") + 1])

  def kill_while_sending() -> None:
    before = written()
    while written() == before:  # the length is written first
      pass
    os.kill(os.getpid(), signal.SIGKILL)

  if batch == 3:
    threading.Thread(target=kill_while_sending).start()
  return bytes(2 * 10**7)


def test_a_worker_that_is_killed_in_the_middle_of_a_result_is_an_error(
  monkeypatch,
):
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 0)
  workers = make(2, be_killed_while_sending)
  with pytest.raises(UserError, match=r"^was killed\.$"), workers:
    for _ in workers.map(range(10)):
      pass
  assert multiprocessing.active_children() == []


def raise_key_error(batch: int) -> None:
  raise KeyError(batch)


def test_an_error_of_the_function_is_raised_here_and_says_where_it_was(
  monkeypatch,
):
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 0)
  with (
    pytest.raises(KeyError, match="5") as info,
    make(1, raise_key_error) as workers,
  ):
    next(workers.map([5]))
  assert "in raise_key_error" in info.value.__notes__[0]
