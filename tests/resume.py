# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A plugin of pytest: `--resume` leaves out tests that passed at this commit.

A run of all slow tests takes longer than some machines are free. Passed tests
are recorded in .pytest_cache, by commit, Python and TensorFlow. `--resume` is
refused if files differ from the commit, or without git, because then a record
would not say which code passed.
"""

import importlib.metadata
import platform
import subprocess
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
  """Adds `--resume`."""
  parser.addoption(
    "--resume",
    action="store_true",
    help="leave out tests that passed at this commit",
  )


def _git(*arguments: str) -> str:
  run = ["git", "-C", str(_ROOT), *arguments]
  try:
    done = subprocess.run(run, capture_output=True, text=True, check=True)
  except (OSError, subprocess.CalledProcessError) as error:
    raise pytest.UsageError(
      f"--resume needs a git checkout ({error}): run the tests without it"
    ) from None
  return done.stdout


def _find_record() -> Path:
  if changed := _git("status", "--porcelain"):
    raise pytest.UsageError(
      f"--resume needs a commit of all files; these differ:\n{changed}"
    )
  versions = platform.python_version(), importlib.metadata.version("tensorflow")
  name = "-".join([_git("rev-parse", "HEAD").strip(), *versions])
  return _ROOT / ".pytest_cache" / "passed" / name


class Resume:
  """Leaves out the tests that a record names, and adds tests that pass."""

  def __init__(self):
    """Reads the record of this commit."""
    self._record = _find_record()
    self._record.parent.mkdir(parents=True, exist_ok=True)
    self._record.touch()
    self._passed = {*self._record.read_text(encoding="utf-8").splitlines()}
    self._failed: set[str] = set()

  @pytest.hookimpl(trylast=True)  # after -m has removed tests
  def pytest_collection_modifyitems(
    self, config: pytest.Config, items: list[pytest.Item]
  ) -> None:
    """Leaves out tests that have passed."""
    done = [x for x in items if x.nodeid in self._passed]
    items[:] = [x for x in items if x.nodeid not in self._passed]
    config.hook.pytest_deselected(items=done)

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    """Records a test that has passed, or was skipped."""
    if report.failed:
      self._failed.add(report.nodeid)
    elif report.when == "teardown" and report.nodeid not in self._failed:
      with self._record.open("a", encoding="utf-8") as file:
        file.write(f"{report.nodeid}\n")

  def pytest_sessionfinish(self, session: pytest.Session) -> None:
    """Passes if all tests have passed before."""
    found_none = session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED
    if self._passed and found_none:
      session.exitstatus = pytest.ExitCode.OK


def pytest_configure(config: pytest.Config) -> None:
  """Adds `Resume` if it is asked for."""
  if config.getoption("resume"):
    config.pluginmanager.register(Resume(), "resume")
