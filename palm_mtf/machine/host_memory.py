# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory that this process holds, and memory that it can still take."""

import ctypes
import functools
import gc
import os
import re
import resource

from palm_mtf.machine.processors import read_or_empty

_MADV_DONTNEED = 4  # of Linux's mman.h


def resident_bytes() -> int:
  """Returns this process's resident bytes now, mapped files included."""
  with open("/proc/self/statm", encoding="ascii") as file:
    pages = int(file.read().split()[1])
  return pages * os.sysconf("SC_PAGE_SIZE")


def largest_resident_bytes(process: int | str = "self") -> int:
  """Returns a process's peak resident bytes so far; "self" is this process."""
  # getrusage(2) would include the parent process's memory at the fork.
  with open(f"/proc/{process}/status", encoding="ascii") as file:
    (line,) = (x for x in file if x.startswith("VmHWM:"))
  return int(line.split()[1]) * 1024


def memory_bytes() -> tuple[int, int]:
  """Returns total memory, and memory that this process can take, in bytes."""
  # In /proc/meminfo, kB means KiB.
  text = read_or_empty("/proc/meminfo")
  kibibytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE))
  total = int(kibibytes.get("MemTotal", 0)) * 1024
  available = int(kibibytes.get("MemAvailable", 0)) * 1024
  # The limit of a container.
  limit = read_or_empty("/sys/fs/cgroup/memory.max").strip()
  if limit.isdigit() and int(limit) < total:
    used = read_or_empty("/sys/fs/cgroup/memory.current").strip()
    left = int(limit) - int(used) if used.isdigit() else int(limit)
    total, available = int(limit), min(available, left)
  soft, _ = resource.getrlimit(resource.RLIMIT_AS)
  if soft != resource.RLIM_INFINITY:  # a limit by ulimit -v
    pages = int(read_or_empty("/proc/self/statm").split()[0])
    left = soft - pages * os.sysconf("SC_PAGE_SIZE")
    available = min(available, left)
  return total, max(0, available)


def free_garbage() -> None:
  """Frees unreachable objects before a graph is built.

  A graph is a cycle of objects and tensors. Python collects cycles late, and
  the C library does not return all freed memory. Without this function, a run
  that samples, evaluates or rewinds often would hold several graphs at once.
  """
  gc.collect()
  _call_glibc("malloc_trim", 0)


def release_file_pages() -> None:
  """Releases pages of mapped files that this process has only read.

  The pages stay in the system's page cache, and are mapped again when they are
  read. This saves a third of the memory of `generate`, and of a short `train`.
  """
  for begin, end in _unchanged_files():
    address, size = ctypes.c_void_p(begin), ctypes.c_size_t(end - begin)
    _call_glibc("madvise", address, size, _MADV_DONTNEED)


def _unchanged_files() -> list[tuple[int, int]]:
  """Returns address ranges of file mappings that have no changed page."""
  found, mapping = [], None
  # Each mapping has a line "begin-end permissions offset device inode path",
  # then lines "field: value".
  for line in read_or_empty("/proc/self/smaps").splitlines():  # may be absent
    first, _, rest = line.partition(" ")
    # A mapping with changed pages, such as relocated pointers, is not released,
    # because the changes exist only in memory.
    if first == "Anonymous:":
      if mapping and rest.split()[0] == "0":
        found.append(mapping)
    elif not first.endswith(":"):
      permissions, _, _, inode, *_ = rest.split(maxsplit=4)
      begin, end = (int(x, 16) for x in first.split("-"))
      is_read_only_file = inode != "0" and "w" not in permissions
      mapping = (begin, end) if is_read_only_file else None
  return found


def _call_glibc(name: str, *arguments: object) -> None:
  if function := getattr(_libc(), name, None):
    function(*arguments)


# Cached, because each call of ctypes.CDLL makes new classes.
_libc = functools.cache(lambda: ctypes.CDLL(None))
