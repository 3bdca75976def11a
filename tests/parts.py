# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the tests, and lint at the same time; prints what each costs.

Its options, except --lint, are those of pytest.
"""

import concurrent.futures
import dataclasses
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import IO

# make passes its variables on, such as VENV.
_LINT = ("make", "--no-print-directory", "lint")
_PYTEST = (sys.executable, "-m", "pytest", "-q", "-rs", "--workers", "2")


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a part has cost, with all its processes."""

  name: str
  exit_code: int
  secs: float
  processor_secs: float  # user and system
  most_bytes: int  # of its largest process


def run_part(
  name: str, command: Sequence[str], output: IO[str] | None = None
) -> Cost:
  """Runs a command, with its output in a file if one is given."""
  start = time.monotonic()
  child = subprocess.Popen(command, stdout=output, stderr=output)
  _, status, used = os.wait4(child.pid, 0)
  child.returncode = os.waitstatus_to_exitcode(status)
  return Cost(
    name,
    child.returncode,
    time.monotonic() - start,
    used.ru_utime + used.ru_stime,
    used.ru_maxrss * 1024,
  )


def describe(costs: Sequence[Cost]) -> str:
  """Returns a table of the parts."""
  lines = ["part    wall   processor   largest process"]
  for x in costs:
    code = f"   exit code {x.exit_code}" if x.exit_code else ""
    lines.append(
      f"{x.name:<5} {_clock(x.secs)}      {_clock(x.processor_secs)}"
      f"           {x.most_bytes / 1e9:4.2f} GB{code}"
    )
  return "\n".join(lines)


def _clock(secs: float) -> str:
  minutes, rest = divmod(round(secs), 60)
  return f"{minutes:3}:{rest:02}"


def main(options: Sequence[str]) -> int:
  """Runs all parts; returns 1 if any of them fails, else 0."""
  # Otherwise each process compiles the modules that the others compile, too.
  os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
  tests = [*_PYTEST, *(x for x in options if x != "--lint")]
  with (
    concurrent.futures.ThreadPoolExecutor() as pool,
    tempfile.TemporaryFile("w+") as shown,
  ):
    # Lint has one process, which uses the time when a worker has no test.
    others = []
    if "--lint" in options:
      others = [pool.submit(run_part, "lint", _LINT, shown)]
    costs = [run_part("tests", tests), *(x.result() for x in others)]
    shown.seek(0)
    print(shown.read(), describe(costs), sep="\n")
  return int(any(x.exit_code for x in costs))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
