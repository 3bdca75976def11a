# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The tests that README.md names exist, and none is skipped."""

import ast
import shutil
import subprocess
import sys

import pytest

from tests import claims
from tests.source_files import ROOT, nodes_of


def test_every_test_that_the_readme_names_exists():
  fast, slow = claims.named_tests()
  assert len(fast) > 20
  assert len(slow) > 10
  for name in sorted(fast | slow):
    path, _, test = name.partition("::")
    assert (ROOT / path).is_file(), name
    functions = {
      x.name for x in nodes_of(path) if isinstance(x, ast.FunctionDef)
    }
    assert test in functions, name


def test_every_row_of_the_readme_names_a_test():
  text = (ROOT / "README.md").read_text(encoding="utf-8")
  table = text.split("| claim |")[1].split("\n\n")[0].splitlines()[2:]
  assert len(table) > 20
  for row in table:
    assert "_test.py::test_" in row, row


@pytest.mark.parametrize(
  "cause, error",
  [
    ("@pytest.mark.slow", "under `make test`: no test"),
    ("@pytest.mark.skip", "tests/a_test.py::test_a, which is skipped"),
    (
      "pytest.importorskip('absent_library')",
      "tests/a_test.py, which is skipped",
    ),
  ],
)
def test_a_named_test_that_does_not_run_fails(cause, error, tmp_path):
  """Runs the plugin on a project whose README names one test."""
  folder = tmp_path / "tests"
  folder.mkdir()
  (tmp_path / "README.md").write_text(
    "| a claim | `a_test.py::test_a` | |\n", encoding="utf-8"
  )
  shutil.copy(ROOT / "tests" / "claims.py", folder / "claims.py")
  (folder / "a_test.py").write_text(
    f"import pytest\n{cause}\ndef test_a(): pass\n", encoding="utf-8"
  )
  (tmp_path / "pytest.ini").write_text(
    "[pytest]\nmarkers = slow\npythonpath = tests\n"
  )
  done = subprocess.run(
    [sys.executable, "-m", "pytest", "-p", "claims", "tests"],
    capture_output=True,
    text=True,
    check=False,
    cwd=tmp_path,
  )
  assert done.returncode != 0, done.stdout
  assert error in done.stdout + done.stderr
