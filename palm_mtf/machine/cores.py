# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU cores: those of this process, their quota and their load."""

import os
import time
from collections.abc import Mapping
from pathlib import Path

STAT = Path("/proc/stat")
# The quota of a container: of control groups version 2, and of version 1.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CPU_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")

# What each column of /proc/stat counts; guests are part of "user" and "nice".
_COLUMNS = "user nice system idle iowait irq softirq steal".split()


def visible_cores() -> list[int]:
  """Returns the cores that this process may run on, by number."""
  return sorted(os.sched_getaffinity(0))


def core_quota() -> float | None:
  """Returns the CPU quota of a container in cores, None without a limit."""
  quota, _, period = _text(CPU_MAX).partition(" ")
  if not quota:
    quota, period = _text(CPU_QUOTA), _text(CPU_PERIOD)
  # No limit is "max" in version 2, -1 in version 1, or there are no files.
  if not quota.isdigit() or not period.isdigit():
    return None
  return int(quota) / int(period)  # both in microseconds


def usable_cores() -> int:
  """Returns the number of processes that compute at full speed at once."""
  quota, visible = core_quota(), len(visible_cores())
  return visible if quota is None else max(1, min(visible, int(quota)))


def thread_count(environment: Mapping[str, str]) -> int:
  """Returns the number of threads of a matrix product.

  Args:
    environment: environment variables, which TensorFlow and oneDNN read.
  """
  asked = [environment.get(name, "") for name in THREAD_VARIABLES]
  return max([len(visible_cores()), *(int(x) for x in asked if x.isdigit())])


THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def busy_shares(secs: float) -> dict[int, float]:
  """Returns the load of each visible core by other programs, 0 to 1.

  Args:
    secs: seconds to measure for, in which this process sleeps.
  """
  before = _core_times()
  time.sleep(secs)
  after = _core_times()
  shares = {}
  for core in visible_cores():
    if core in before and core in after:
      passed = {x: after[core][x] - before[core][x] for x in _COLUMNS}
      # "steal" is busy: the host of a virtual machine took the time away.
      free = passed["idle"] + passed["iowait"]
      shares[core] = 1 - free / max(1, sum(passed.values()))
  return shares


def _core_times() -> dict[int, dict[str, int]]:
  """Returns the ticks of each core since the machine started, by column."""
  times = {}
  for line in _text(STAT).splitlines():
    name, *values = line.split()
    if name.startswith("cpu") and name[3:].isdigit():
      ticks = map(int, values[: len(_COLUMNS)])
      times[int(name[3:])] = dict(zip(_COLUMNS, ticks, strict=True))
  return times


def _text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8").strip()
  except OSError:
    return ""
