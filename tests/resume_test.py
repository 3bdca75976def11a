# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`--resume` runs only what has not passed at this commit."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.source_files import ROOT

PLUGINS = ("-p", "tests.resume", "-p", "tests.workers")
TESTS = """
import os
def test_passes():
  pass
def test_fails_first():
  assert "REPAIRED" in os.environ
"""


@pytest.mark.slow  # seven runs of pytest
def test_tests_that_passed_at_a_commit_are_left_out(tmp_path):
  def git(*arguments):
    who = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True)

  def run(*options, **variables):
    command = ["-m", "pytest", "-q", *PLUGINS, *options]
    return subprocess.run(
      [sys.executable, *command, "a_test.py"],
      cwd=tmp_path,
      env={**os.environ, "PYTHONPATH": str(tmp_path), **variables},
      capture_output=True,
      text=True,
      check=False,
    )

  (tmp_path / "tests").mkdir()
  for name in ("claims", "resume", "workers"):
    shutil.copy(ROOT / "tests" / f"{name}.py", tmp_path / "tests")
  (tmp_path / ".gitignore").write_text(".pytest_cache\n__pycache__\n")
  (tmp_path / "a_test.py").write_text(TESTS)
  git("init", "-q")
  git("add", ".")
  git("commit", "-q", "-m", "a")
  workers = ("--workers", "1", "--resume")
  assert "1 failed, 1 passed" in run(*workers).stdout
  shown = run(*workers, REPAIRED="1")
  assert (shown.returncode, shown.stdout.count("1 passed, 1 desel")) == (0, 1)
  shown = run(*workers, REPAIRED="1")
  assert (shown.returncode, shown.stdout.count("\n2 deselected")) == (0, 1)
  assert "2 passed" in run(REPAIRED="1").stdout, "without --resume"
  (tmp_path / "a_test.py").write_text(TESTS + "# changed\n")
  shown = run("--resume", REPAIRED="1")
  assert shown.returncode == 4
  assert "these differ:\n M a_test.py" in shown.stderr
  git("commit", "-q", "-a", "-m", "b")
  assert "2 passed" in run("--resume", REPAIRED="1").stdout
