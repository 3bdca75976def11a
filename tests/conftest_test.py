# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of tests ends, whatever a test does, and names the test."""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

WAITS = """
import time
def test_waits():
  time.sleep(600)
"""

DIES = """
import os
def test_dies():
  os.abort()
"""

# No signal interrupts the second lock, so Python cannot run a handler.
HANGS = """
import ctypes, pytest
@pytest.mark.timeout(1)
def test_hangs():
  mutex = ctypes.create_string_buffer(64)
  for _ in range(2):
    ctypes.CDLL(None).pthread_mutex_lock(mutex)
"""

GROWS = """
kept = []
def test_keeps():
  kept.append(b"." * 200_000_000)
def test_comes_later():
  pass
def test_grows():
  b"." * 400_000_000
"""

KEEPS = """
import os
kept = []
def test_keeps():
  kept.append(b"." * 200_000_000)
  print(os.getpid())
def test_comes_second():
  print(os.getpid())
def test_comes_third():
  print(os.getpid())
"""

# Lower the limits, because filling gigabytes takes seconds.
LIMITS = """
from tests import workers
workers._MAX_KEPT_BYTES, workers._MAX_TEST_BYTES = 3 * 10**8, 3 * 10**8
"""


def run(folder, *options, **modules):
  """Runs modules as tests, with our settings and hooks."""
  shutil.copy(ROOT / "pyproject.toml", folder)
  shutil.copy(ROOT / "tests" / "conftest.py", folder)
  (folder / "limits.py").write_text(LIMITS)
  for name, program in modules.items():
    (folder / f"{name}_test.py").write_text(program)
  return subprocess.run(
    [sys.executable, "-m", "pytest", "-q", *options, "."],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": f"{folder}:{ROOT}"},
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  "program, test",
  [(DIES, "test_dies"), (HANGS, "test_hangs")],
  ids=["dies", "hangs"],
)
def test_a_run_ends_at_once_where_a_worker_dies_or_hangs(
  program, test, tmp_path
):
  start = time.monotonic()
  shown = run(tmp_path, "--workers", "2", a=program, b=WAITS, c=WAITS)
  assert time.monotonic() - start < 120
  assert shown.returncode == 1
  assert f"a_test.py::{test}: the process that ran it died" in shown.stdout


def test_a_test_that_hangs_is_shown_without_workers_too(tmp_path):
  shown = run(tmp_path, a=HANGS)
  assert shown.returncode == 1
  assert "Timeout" in shown.stdout
  assert "in test_hangs" in shown.stdout


def test_a_test_that_needs_too_much_memory_itself_fails(tmp_path):
  shown = run(tmp_path, "-p", "limits", a=GROWS)
  assert shown.returncode == 1
  assert re.findall(r"^ERROR a_test.py::(\w+)", shown.stdout, re.MULTILINE) == [
    "test_grows"
  ]
  reason = "this test has needed 0.4 GB of memory; 0.3 GB is the most"
  assert reason in shown.stdout
  assert "3 passed, 1 error" in shown.stdout


@pytest.mark.slow
def test_a_worker_that_has_grown_is_replaced_between_files(tmp_path):
  files = dict.fromkeys("abcd", KEEPS)
  shown = run(tmp_path, "--workers", "1", "-rP", "-p", "limits", **files)
  assert shown.returncode == 0, shown.stdout
  assert "12 passed" in shown.stdout
  processes = re.findall(r"^(\d+)$", shown.stdout, re.MULTILINE)
  assert len(processes) == 12
  for i in range(0, 12, 3):
    assert len({*processes[i : i + 3]}) == 1, "a file was split"
  assert len({*processes}) > 1


def test_tests_of_an_absent_library_are_skipped(tmp_path):
  """Only those whose library an extra has: a wrong name is an error."""
  absent = tmp_path / "llguidance.py"
  absent.write_text(
    "raise ModuleNotFoundError('No module', name='llguidance')\n"
  )
  module = "import {}\ndef test_one():\n  pass\n"
  files = {x: module.format(x) for x in ("llguidance", "llguidence", "os")}
  shown = run(tmp_path, "-rsE", **files)
  assert shown.returncode == 2
  assert "llguidance is not installed" in shown.stdout
  assert re.findall(r"^ERROR (\w+)_test.py", shown.stdout, re.MULTILINE) == [
    "llguidence"
  ]
