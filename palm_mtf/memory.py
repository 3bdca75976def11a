# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How much memory of the machine this process holds."""

import os


def resident_bytes() -> int:
  """Returns what is in memory now, files that are mapped included."""
  with open("/proc/self/statm", encoding="ascii") as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")
