# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A run of tests ends, whatever a test does, and names the test."""

import os
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
def test_grows():
  b"." * 300_000_000
def test_comes_later():
  pass
"""

MAX_BYTES = "2 * 10**9"


def run(folder, *options, **modules):
  """Runs modules as tests, with our settings and hooks."""
  shutil.copy(ROOT / "pyproject.toml", folder)
  hooks = (ROOT / "tests" / "conftest.py").read_text(encoding="utf-8")
  assert hooks.count(MAX_BYTES) == 1
  # Lower the limit, because filling two gigabytes takes seconds.
  (folder / "conftest.py").write_text(hooks.replace(MAX_BYTES, "3 * 10**8"))
  for name, program in modules.items():
    (folder / f"{name}_test.py").write_text(program)
  return subprocess.run(
    [sys.executable, "-m", "pytest", "-q", *options, "."],
    cwd=folder,
    env={**os.environ, "PYTHONPATH": str(ROOT)},
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
  shown = run(
    tmp_path, "-n", "2", "--dist", "loadfile", a=program, b=WAITS, c=WAITS
  )
  assert time.monotonic() - start < 120
  assert shown.returncode == 1
  assert f"a_test.py::{test}: the process that ran it died" in shown.stdout


def test_a_test_that_hangs_is_shown_without_workers_too(tmp_path):
  shown = run(tmp_path, a=HANGS)
  assert shown.returncode == 1
  assert "Timeout" in shown.stdout
  assert "in test_hangs" in shown.stdout


def test_the_first_test_after_which_memory_is_beyond_bounds_fails(tmp_path):
  shown = run(tmp_path, a=GROWS)
  assert shown.returncode == 1
  assert "ERROR a_test.py::test_grows - Failed: this process has" in (
    shown.stdout
  )
  assert "2 passed, 1 error" in shown.stdout
