# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Host memory of this process."""

import ctypes
import gc
import os

_M_ARENA_MAX = -8  # of glibc's malloc.h
_MAX_ARENAS = 2
# Whoever sets one of these decides alone.
_VARIABLES = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")


def resident_bytes() -> int:
  """Returns the resident bytes now, mapped files included."""
  with open("/proc/self/statm", encoding="ascii") as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


def largest_resident_bytes(process: int | str = "self") -> int:
  """Returns the largest resident bytes of a process so far.

  Args:
    process: its number; "self" is this one.
  """
  # The figure of getrusage(2) includes the memory that the process which
  # started this one had at that moment.
  with open(f"/proc/{process}/status", encoding="ascii") as file:
    (line,) = (x for x in file if x.startswith("VmHWM:"))
  return int(line.split()[1]) * 1024


def free_garbage() -> None:
  """Frees what nothing refers to any more, before a graph is built.

  A graph is a cycle of many objects and tensors: Python looks for them late,
  and the C library keeps what is freed between others. A run that samples,
  evaluates or rewinds often would have several at once.
  """
  gc.collect()
  _of_glibc("malloc_trim", 0)


def limit_arenas() -> None:
  """Limits the arenas of glibc's malloc, before this process has threads."""
  # By default threads have an arena each, up to 8 a core. What one program was
  # compiled and run in is free for the next, but only for the same threads: the
  # arenas fill with holes, and a run that rewinds, samples and evaluates grows.
  if not any(name in os.environ for name in _VARIABLES):
    _of_glibc("mallopt", _M_ARENA_MAX, _MAX_ARENAS)


def _of_glibc(name: str, *arguments: int) -> None:
  """Calls a function that other C libraries do not have."""
  function = getattr(ctypes.CDLL(None), name, None)
  if function:
    function(*arguments)
