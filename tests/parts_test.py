# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The parts of `make test` run every test, and print what they cost."""

import sys

from tests import parts
from tests.source_files import ROOT

# A process that needs a second of processor time and 200 MB.
CHILD = """
import time
x = b"." * 200_000_000
while time.process_time() < 1: pass
"""


def test_the_cost_of_a_part_includes_its_processes():
  parent = (
    f"import subprocess; subprocess.run([{sys.executable!r}, '-c', {CHILD!r}])"
  )
  cost = parts.run_part("a", [sys.executable, "-c", parent])
  assert 1 <= cost.processor_secs < 10
  assert 2e8 < cost.most_bytes < 1e9
  failed = parts.run_part("b", [sys.executable, "-c", "raise SystemExit(3)"])
  table = parts.describe([cost, failed]).splitlines()
  assert table[1].startswith("a ")
  assert table[2].endswith("exit code 3")
  assert table[3].startswith("all parts")


def test_every_test_file_is_in_one_part():
  *some, rest = parts.list_parts([]).values()
  named = [x for each in some for x in each if x.startswith("tests/")]
  ignored = [x.removeprefix("--ignore=") for x in rest if "--ignore" in x]
  assert sorted(named) == sorted(ignored)
  assert all((ROOT / x).is_dir() for x in named)
  assert len({*named}) == len(named)
