# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The cores that this process may use, and how busy others keep them."""

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
  """Returns the cores' worth of time that a container has, None if all."""
  quota, _, period = _text(CPU_MAX).partition(" ")
  if not quota:
    quota, period = _text(CPU_QUOTA), _text(CPU_PERIOD)
  if not quota.isdigit() or not period.isdigit():  # "max", or -1
    return None
  return int(quota) / int(period)


def thread_count(environment: Mapping[str, str]) -> int:
  """Returns the threads that share a product's work.

  Args:
    environment: the variables that TensorFlow and oneDNN read.
  """
  asked = [environment.get(name, "") for name in THREAD_VARIABLES]
  return max([len(visible_cores()), *(int(x) for x in asked if x.isdigit())])


THREAD_VARIABLES = ("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS")


def busy_shares(secs: float) -> dict[int, float]:
  """Watches the cores while this process sleeps.

  Args:
    secs: how long.

  Returns:
    {core: the share of the time that it was busy with other programs, or that
    the host of a virtual machine took away}, of `visible_cores`.
  """
  before = _core_times()
  time.sleep(secs)
  after = _core_times()
  shares = {}
  for core in visible_cores():
    if core in before and core in after:
      passed = {x: after[core][x] - before[core][x] for x in _COLUMNS}
      free = passed["idle"] + passed["iowait"]
      shares[core] = 1 - free / max(1, sum(passed.values()))
  return shares


def _core_times() -> dict[int, dict[str, int]]:
  """Returns what STAT says of each core, in ticks."""
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
