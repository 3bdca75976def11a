# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest that checks README.md's table of claims and their tests.

The second column of the table names tests that `make test` runs. The third
column names slower tests, which have the marker `slow` or `peers`. A test is
named by its file below tests/ and its function, as in
`folder/file_test.py::test_function`. A test with slow and fast parameters may
be in both columns.

A named test fails if it is skipped. Its file is refused if the marker of the
test belongs to the other column.
"""

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_README = Path(__file__).resolve().parent.parent / "README.md"
_ROW = re.compile(r"^\|[^|]+\|([^|]*)\|([^|]*)\|$", re.MULTILINE)
_TEST = re.compile(r"`([\w/]+_test\.py::\w+)`")


@functools.cache
def named_tests() -> tuple[frozenset[str], frozenset[str]]:
  """Returns the names of fast and of slow tests, beginning with tests/."""
  fast, slow = set(), set()
  for cells in _ROW.findall(_README.read_text(encoding="utf-8")):
    for names, cell in zip((fast, slow), cells, strict=True):
      names |= {f"tests/{name}" for name in _TEST.findall(cell)}
  return frozenset(fast), frozenset(slow)


def is_slow(item: pytest.Item) -> bool:
  """Returns whether `make test` leaves out a test."""
  return any(map(item.get_closest_marker, ("slow", "peers")))


def _name(item: pytest.Item) -> str:
  return item.nodeid.partition("[")[0]


@pytest.hookimpl(tryfirst=True)  # before -m removes tests
def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Refuses a named test whose marker belongs to the other column."""
  if any("::" in argument for argument in config.args):
    return  # only some tests of a file are collected
  files = {_name(item).partition("::")[0] for item in items}
  for names, slow in zip(named_tests(), (False, True), strict=True):
    found = {_name(item) for item in items if is_slow(item) == slow}
    for name in sorted(names - found):
      if name.partition("::")[0] in files:
        column = "the slower tests" if slow else "`make test`"
        raise pytest.UsageError(
          f"README.md names {name} under {column}: no test"
        )


def _fail_if_skipped(
  name: str, report: pytest.TestReport | pytest.CollectReport
) -> None:
  named = frozenset().union(*named_tests())
  named |= {name.partition("::")[0] for name in named}
  if report.outcome == "skipped" and name in named:
    report.outcome = "failed"
    report.longrepr = (
      f"README.md names {name}, which is skipped: {report.longrepr}"
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
  """Fails a named test that is skipped."""
  report = yield
  _fail_if_skipped(_name(item), report)
  return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Iterator[None]:
  """Fails a file that is skipped and has a named test."""
  report = yield
  _fail_if_skipped(collector.nodeid, report)
  return report
