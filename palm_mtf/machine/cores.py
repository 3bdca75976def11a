# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""CPU cores that this process may use, their quota and its threads."""

import os
from collections.abc import Mapping
from pathlib import Path

# The quota of a container: of control groups version 2, and of version 1.
CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
CPU_QUOTA = Path("/sys/fs/cgroup/cpu/cpu.cfs_quota_us")
CPU_PERIOD = Path("/sys/fs/cgroup/cpu/cpu.cfs_period_us")


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


def _text(path: Path) -> str:
  try:
    return path.read_text(encoding="utf-8").strip()
  except OSError:
    return ""
