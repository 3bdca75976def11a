# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs lint and tests in parts, one after another, and prints what each costs.

  python -m tests.parts [--lint] [OPTION OF PYTEST ...]

Each part has its own processes, because compiled code and imports stay in a
process: only modules of the last part, which has all other folders, import
SeqIO. In each part the longest files run first, so that both processes end at
about the same time.
"""

import dataclasses
import os
import subprocess
import sys
import time
from collections.abc import Sequence

_FOLDERS = {
  "executors": "executors foreign_models",
  "graphs": (
    "accounting architecture mesh programs model optim generation/decode ops "
    "unitransformer checkpoints native"
  ),
  "runs": (
    "runtime training commands export generation/inference generation/serving"
  ),
}
_PYTEST = (
  *(sys.executable, "-m", "pytest", "-q", "-rs"),
  *("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"),
)
_NO_TESTS = 5  # pytest's exit code if no test was selected


@dataclasses.dataclass(frozen=True)
class Cost:
  """What a part has cost, with all its processes."""

  name: str
  exit_code: int
  secs: float
  processor_secs: float  # user and system
  most_bytes: int  # of its largest process


def run_part(name: str, command: Sequence[str]) -> Cost:
  """Runs a command as a part; returns its cost."""
  print("", " ".join(command), sep="\n", flush=True)
  start = time.monotonic()
  child = subprocess.Popen(command)
  _, status, used = os.wait4(child.pid, 0)
  child.returncode = os.waitstatus_to_exitcode(status)
  return Cost(
    name,
    child.returncode,
    time.monotonic() - start,
    used.ru_utime + used.ru_stime,
    used.ru_maxrss * 1024,
  )


def list_parts(options: Sequence[str]) -> dict[str, list[str]]:
  """Returns the command of each part, by the part's name."""
  if "--lint" in options:
    # make passes its variables on, such as VENV.
    lint = {"lint": ["make", "--no-print-directory", "lint"]}
    return lint | list_parts([x for x in options if x != "--lint"])
  chosen = {
    f"tests of {name}": [f"tests/{x}" for x in folders.split()]
    for name, folders in _FOLDERS.items()
  }
  named = [x for folders in chosen.values() for x in folders]
  chosen["other tests"] = [f"--ignore={x}" for x in named]
  return {x: [*_PYTEST, *options, *y] for x, y in chosen.items()}


def describe(costs: Sequence[Cost]) -> str:
  """Returns a table of the parts and their sum."""
  total = Cost(
    "all parts",
    0,
    sum(x.secs for x in costs),
    sum(x.processor_secs for x in costs),
    max(x.most_bytes for x in costs),
  )
  lines = ["part                  wall   processor   largest process"]
  for x in (*costs, total):
    code = f"   exit code {x.exit_code}" if x.exit_code else ""
    lines.append(
      f"{x.name:<18}  {_clock(x.secs)}       {_clock(x.processor_secs)}"
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
  costs = []
  for name, command in list_parts(options).items():
    cost = run_part(name, command)
    if cost.exit_code == _NO_TESTS:
      cost = dataclasses.replace(cost, exit_code=0)
    costs.append(cost)
  print("", describe(costs), sep="\n")
  return int(any(x.exit_code for x in costs))


if __name__ == "__main__":
  sys.exit(main(sys.argv[1:]))
