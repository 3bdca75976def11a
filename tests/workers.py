# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: `--workers N` forks N processes that run tests.

The main process imports all tests and gives each worker a file at a time. A
worker is a fork, so that it imports nothing itself. A process never frees
compiled code and modules, so a worker that has become large is replaced by a
new one before its next file. A test fails if it needs too much memory, without
what its process held before.
"""

import collections
import contextlib
import ctypes
import gc
import itertools
import multiprocessing
import os
import sys
import types
import warnings
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path

import pytest

from palm_mtf.machine import compiled_code
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
from tests import claims

# A worker is replaced once it has grown by this many bytes. It begins with
# 0.35 GB of imports, which all processes share.
_MAX_KEPT_BYTES = 4 * 10**8
# The memory that a test may need; a slow test may need twice as much. Fixtures
# count for the first test that uses them.
_MAX_TEST_BYTES = 10**9
# After this much new memory, collect garbage.
_MUCH_BYTES = 2 * 10**8

_before = pytest.StashKey[int]()
_collected = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds `--workers`."""
  parser.addoption(
    "--workers",
    type=int,
    default=0,
    help="run files of tests in so many processes at a time",
  )


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
  """Measures the process before a test."""
  item.stash[_before] = resident_bytes()
  with contextlib.suppress(OSError):  # not every kernel has this file
    # 5 sets the peak of the resident bytes to the resident bytes now.
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
  yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(
  item: pytest.Item, nextitem: pytest.Item | None
) -> Iterator[None]:
  """Frees memory, and fails a test that has needed too much."""
  yield
  needed = largest_resident_bytes() - item.stash[_before]
  _free_memory(item, getattr(nextitem, "path", None) != item.path)
  most = _MAX_TEST_BYTES * (2 if claims.is_slow(item) else 1)
  if needed > most:
    pytest.fail(
      f"this test has needed {needed / 1e9:.1f} GB of memory; "
      f"{most / 1e9:.1f} GB is the most",
      pytrace=False,
    )


def _free_memory(item: pytest.Item, is_last: bool) -> None:
  stash = item.config.stash
  if is_last or resident_bytes() - stash.get(_collected, 0) > _MUCH_BYTES:
    if "jax" in sys.modules:
      sys.modules["jax"].clear_caches()  # of all functions that it compiled
    gc.collect()  # graphs are reference cycles
    gc.freeze()  # the remaining objects were imported and stay
    ctypes.CDLL(None).malloc_trim(0)
    stash[_collected] = resident_bytes()


class _Worker:
  """A process that runs files of tests.

  In that process it is also a pytest plugin, which sends ("hook", name,
  arguments) for what the main process reports. After each file the process
  sends ("grown", bytes), by how much its memory has grown.
  """

  def __init__(self, session: pytest.Session, files: list[list[pytest.Item]]):
    """Starts the process, which waits for the number of a file."""
    self.running = "before the first test"
    self.is_ended = False
    self._session, self._files = session, files
    self.pipe, self._sent = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork")
    self.process = fork.Process(target=self._work)
    with warnings.catch_warnings():
      # Threads of imported modules are idle here.
      warnings.simplefilter("ignore")
      self.process.start()
    self._sent.close()  # so the pipe ends with the process

  def _work(self) -> None:
    plugins = self._session.config.pluginmanager
    capture = plugins.getplugin("capturemanager")
    # The main process captures into files, which forks would share.
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    # The main process prints and records.
    terminal = plugins.getplugin("terminalreporter")
    for plugin in (terminal, plugins.getplugin("resume")):
      if plugin:
        plugins.unregister(plugin)
    writer = types.SimpleNamespace(_tw=terminal._tw)
    plugins.register(writer, "terminalreporter")
    plugins.register(self)
    begin = resident_bytes()
    while (number := self._sent.recv()) is not None:
      items = self._files[number]
      # Between files only fixtures of the session stay.
      end = types.SimpleNamespace(listchain=lambda: [self._session])
      for item, following in itertools.pairwise([*items, end]):
        item.ihook.pytest_runtest_protocol(item=item, nextitem=following)
      compiled_code.save_compiled_code()
      self._sent.send(("grown", resident_bytes() - begin))
    self._session._setupstate.teardown_exact(None)

  def _send(self, name: str, **arguments: object) -> None:
    self._sent.send(("hook", name, arguments))

  def pytest_runtest_logstart(
    self, nodeid: str, location: tuple[str, int | None, str]
  ) -> None:
    """Says which test begins."""
    self._send("pytest_runtest_logstart", nodeid=nodeid, location=location)

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    """Sends the result of a test, its setup or its teardown."""
    data = self._session.config.hook.pytest_report_to_serializable(
      config=self._session.config, report=report
    )
    self._send("pytest_runtest_logreport", report=data)

  def pytest_runtest_logfinish(
    self, nodeid: str, location: tuple[str, int | None, str]
  ) -> None:
    """Says which test has ended."""
    self._send("pytest_runtest_logfinish", nodeid=nodeid, location=location)


class Workers:
  """Runs all tests in workers, in the order of their files."""

  def __init__(self, number: int):
    """`number` workers run at a time."""
    self._number = number

  @pytest.hookimpl(tryfirst=True)
  def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
    """Gives each worker a file when it asks for one, until all have run."""
    if session.testsfailed or session.config.option.collectonly:
      return None  # pytest says what is wrong, or lists the tests
    by_file = itertools.groupby(session.items, key=lambda item: item.path)
    files = [[*items] for _, items in by_file]
    left = collections.deque(range(len(files)))
    workers: dict[Connection, _Worker] = {}
    session.config._tmp_path_factory.getbasetemp()  # one for all workers
    for code in compiled_code._shared:
      # A fork while the thread that saves the code holds its lock would leave
      # the lock held in the worker forever.
      os.register_at_fork(
        before=code._lock.acquire,
        after_in_parent=code._lock.release,
        after_in_child=code._lock.release,
      )
    try:
      while left or workers:
        while left and len(workers) < self._number:
          for code in compiled_code._shared:
            code.load()  # what earlier workers have compiled
          worker = _Worker(session, files)
          workers[worker.pipe] = worker
          worker.pipe.send(left.popleft())
        for pipe in wait([*workers]):
          worker = workers[pipe]
          try:
            self._hear(session, worker, left)
          except EOFError:
            del workers[pipe]
            worker.process.join()
            if not worker.is_ended or worker.process.exitcode:
              pytest.exit(
                f"{worker.running}: the process that ran it died", returncode=1
              )
    finally:
      for worker in workers.values():
        worker.process.kill()
    return True

  def _hear(
    self, session: pytest.Session, worker: _Worker, left: collections.deque
  ) -> None:
    kind, *rest = worker.pipe.recv()
    if kind == "grown":
      worker.is_ended = not left or rest[0] > _MAX_KEPT_BYTES
      worker.pipe.send(None if worker.is_ended else left.popleft())
      return
    name, arguments = rest
    hook = session.config.hook
    worker.running = arguments.get("nodeid", worker.running)
    if "report" in arguments:
      arguments["report"] = hook.pytest_report_from_serializable(
        config=session.config, data=arguments["report"]
      )
    getattr(hook, name)(**arguments)
    if session.shouldfail:
      raise session.Failed(session.shouldfail)
    if session.shouldstop:
      raise session.Interrupted(session.shouldstop)


def pytest_configure(config: pytest.Config) -> None:
  """Adds `Workers` if they are asked for."""
  if number := config.getoption("workers"):
    config.pluginmanager.register(Workers(number))
