# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How much memory of the machine this process holds."""

import os


def resident_bytes() -> int:
  """Returns what is in memory now, files that are mapped included."""
  with open("/proc/self/statm", encoding="ascii") as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


def largest_resident_bytes() -> int:
  """Returns the most that was ever in memory of this process.

  Unlike getrusage's, it does not count what the process that started this one
  held.
  """
  with open("/proc/self/status", encoding="ascii") as file:
    (line,) = (x for x in file if x.startswith("VmHWM:"))
  return int(line.split()[1]) * 1024
