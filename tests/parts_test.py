# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""`make test` prints what its parts cost."""

from tests import processes

# A process that needs a second of processor time and 200 MB.
CHILD = """
import time
x = b"." * 200_000_000
while time.process_time() < 1: pass
"""


# The system counts the memory of the process that starts a part, until the part
# replaces it. So start the parts from a small process.
PROGRAM = f"""
import sys
from tests import parts
child = [sys.executable, "-c", {CHILD!r}]
parent = f"import subprocess; subprocess.run({{child}})"
costs = [
  parts.run_part("a", [sys.executable, "-c", parent]),
  parts.run_part("b", [sys.executable, "-c", "raise SystemExit(3)"]),
]
assert 1 <= costs[0].processor_secs < 10
assert 2e8 < costs[0].most_bytes < 1e9
print(parts.describe(costs), file=sys.stderr)
"""


def test_the_cost_of_a_part_includes_its_processes():
  run = processes.python("-c", PROGRAM)
  assert run.returncode == 0, run.stderr
  table = run.stderr.splitlines()
  assert table[1].startswith("a ")
  assert table[2].endswith("exit code 3")
