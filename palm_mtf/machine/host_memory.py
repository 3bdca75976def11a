# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Host memory of this process."""

import ctypes
import gc
import os


def resident_bytes() -> int:
  """Returns the resident bytes now, mapped files included."""
  with open("/proc/self/statm", encoding="ascii") as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


def largest_resident_bytes() -> int:
  """Returns the largest resident bytes of this process so far."""
  # The figure of getrusage(2) includes the memory that the process which
  # started this one had at that moment.
  with open("/proc/self/status", encoding="ascii") as file:
    (line,) = (x for x in file if x.startswith("VmHWM:"))
  return int(line.split()[1]) * 1024


def free_garbage() -> None:
  """Frees what nothing refers to any more, before a graph is built.

  A graph is a cycle of many objects and tensors: Python looks for them late,
  and the C library keeps what is freed between others. A run that samples,
  evaluates or rewinds often would have several at once.
  """
  gc.collect()
  trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc alone has it
  if trim:
    trim(0)
