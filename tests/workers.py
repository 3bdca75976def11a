# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that bounds the memory of the processes that run tests.

Imported modules and compiled code stay in a process. A worker (a process of
pytest-xdist) that has become large is therefore replaced by a new one before
its next file. A test fails if it needs too much memory itself, whatever its
process held before.
"""

import contextlib
import ctypes
import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
from tests import claims

# A worker is replaced once it keeps this many bytes more than its imports. The
# imports keep 0.4 to 0.65 GB, depending on the part.
_MAX_KEPT_BYTES = 35 * 10**7
# A test, with the fixtures that it is the first to use, may need this much, and
# a slow test twice as much.
_MAX_TEST_BYTES = 10**9
# After this much new memory, collect garbage.
_MUCH_BYTES = 2 * 10**8

_before = pytest.StashKey[int]()
_collected = pytest.StashKey[int]()
_imported = pytest.StashKey[int]()


def pytest_collection_finish(session: pytest.Session) -> None:
  """Measures what the imports of all test modules keep."""
  session.config.stash[_imported] = resident_bytes()


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
  _free_memory(item, nextitem is None or nextitem.path != item.path)
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
  item: pytest.Item, call: pytest.CallInfo
) -> Iterator[None]:
  """Sends the bytes that a worker keeps to the process that schedules tests."""
  report = yield
  if call.when == "teardown":
    report.kept_bytes = resident_bytes() - item.config.stash[_imported]
  return report


class Replacing:
  """The part of the plugin that needs pytest-xdist, in its main process."""

  def __init__(self, config: pytest.Config):
    """Takes the settings of the run."""
    self._plugins = config.pluginmanager
    self._kept: dict[object, int] = {}  # bytes by worker
    self._replaced: set[object] = set()

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    """Records the bytes that a worker keeps after a test."""
    if report.when == "teardown" and hasattr(report, "node"):
      self._kept[report.node] = report.kept_bytes

  @pytest.hookimpl(optionalhook=True)
  def pytest_xdist_make_scheduler(
    self, config: pytest.Config, log: object
  ) -> object:
    """Returns a scheduler that gives a worker that is too large no new file."""
    if config.getvalue("dist") != "loadfile":
      return None  # pytest-xdist's own scheduler
    from xdist.scheduler import LoadFileScheduling

    replacing = self

    class Scheduling(LoadFileScheduling):
      def _reschedule(self, node: object) -> None:
        # A new worker gets files only after it has collected the tests.
        if node.shutting_down or node not in self.registered_collections:
          return
        if self.workqueue and replacing._is_too_large(node):
          # The worker ends after the tests that it has.
          replacing._replaced.add(node)
          node.shutdown()
          return
        super()._reschedule(node)
        # A worker runs a test only after it knows the next one.
        while self.workqueue and self._pending_of(self.assigned_work[node]) < 2:
          self._assign_work_unit(node)

    return Scheduling(config, log)

  def _is_too_large(self, node: object) -> bool:
    return self._kept.get(node, 0) > _MAX_KEPT_BYTES

  @pytest.hookimpl(optionalhook=True)
  def pytest_testnodedown(self, node: object, error: object) -> None:
    """Starts a new worker in place of one that was too large."""
    if not error and node in self._replaced:
      node.gateway.exit()  # otherwise its process would stay until the end
      self._plugins.getplugin("dsession")._clone_node(node)


def pytest_configure(config: pytest.Config) -> None:
  """Adds `Replacing`, except in a worker."""
  if not hasattr(config, "workerinput"):
    config.pluginmanager.register(Replacing(config))
