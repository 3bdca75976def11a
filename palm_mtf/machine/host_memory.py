# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Host memory: that of this process, and what is left for it."""

import ctypes
import gc
import os
import re
import resource

_MADV_DONTNEED = 4  # of Linux's mman.h
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


def memory_bytes() -> tuple[int, int]:
  """Returns the whole memory and what of it this process can still take."""
  # The kernel says kB and means KiB.
  kibibytes = dict(
    re.findall(r"^(\w+):\s+(\d+) kB$", _text("/proc/meminfo"), re.MULTILINE)
  )
  total = int(kibibytes.get("MemTotal", 0)) * 1024
  available = int(kibibytes.get("MemAvailable", 0)) * 1024
  limit = _text("/sys/fs/cgroup/memory.max").strip()  # of a container
  if limit.isdigit() and int(limit) < total:
    # A container's limit counts, not the host's memory.
    used = _text("/sys/fs/cgroup/memory.current").strip()
    left = int(limit) - int(used) if used.isdigit() else int(limit)
    total, available = int(limit), min(available, left)
  soft, _ = resource.getrlimit(resource.RLIMIT_AS)
  if soft != resource.RLIM_INFINITY:  # ulimit -v
    pages = int(_text("/proc/self/statm").split()[0])
    left = soft - pages * os.sysconf("SC_PAGE_SIZE")
    available = min(available, left)
  return total, max(0, available)


def _text(path: str) -> str:
  try:
    with open(path, encoding="utf-8", errors="replace") as file:
      return file.read()
  except OSError:
    return ""


def free_garbage() -> None:
  """Frees what nothing refers to any more, before a graph is built.

  A graph is a cycle of many objects and tensors: Python looks for them late,
  and the C library keeps what is freed between others. A run that samples,
  evaluates or rewinds often would have several at once.
  """
  gc.collect()
  _of_glibc("malloc_trim", 0)


def release_file_pages() -> None:
  """Releases pages of mapped files that this process has only read.

  They stay in the system's cache of files, and come back when they are read.
  """
  for begin, end in _unchanged_files():
    address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    _of_glibc("madvise", address, size, _MADV_DONTNEED)


def _unchanged_files() -> list[tuple[int, int]]:
  """Returns where files are mapped of which no page differs from the file."""
  try:
    with open("/proc/self/smaps", encoding="utf-8") as file:
      text = file.read()
  except OSError:  # not every kernel shows it
    return []
  # A line "begin-end permissions offset device inode path" and lines of fields.
  head = r"^(\w+)-(\w+) (\S+) \w+ \S+ (\d+) .*$"
  _, *parts = re.split(head, text, flags=re.MULTILINE)
  found = []
  for begin, end, permissions, inode, fields in zip(
    *(parts[i::5] for i in range(5)), strict=True
  ):
    # Relocated pointers, say, are in memory alone.
    is_changed = re.search(r"Anonymous: +[1-9]", fields)
    if inode != "0" and "w" not in permissions and not is_changed:
      found.append((int(begin, 16), int(end, 16)))
  return found


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
