# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import mmap
import subprocess
import sys

import pytest

from palm_mtf.machine.host_memory import (
  largest_resident_bytes,
  release_file_pages,
  resident_bytes,
)
from tests import processes

# Eight threads hold memory at once; malloc_info(3) then lists the arenas.
_THREADS = """
import ctypes, sys, threading
from palm_mtf.machine.process import own_process
own_process()
barrier = threading.Barrier(8)
def hold():
  held = bytearray(10_000)
  barrier.wait()
threads = [threading.Thread(target=hold) for _ in range(8)]
for each in threads: each.start()
for each in threads: each.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""


def test_what_is_written_to_counts_and_its_largest_stays_when_given_back():
  before = resident_bytes()
  held = bytearray(b"x") * 2**27
  size = len(held)
  assert 0.9 * size < resident_bytes() - before < 1.5 * size
  del held
  assert largest_resident_bytes() > before + 0.9 * size


def test_the_largest_is_of_this_process_alone():
  held = bytearray(b"x") * 2**27
  program = (
    "from palm_mtf.machine import host_memory as memory; "
    "print(memory.largest_resident_bytes())"
  )
  child = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, check=True, text=True
  )
  assert int(child.stdout) < len(held)


def test_pages_of_files_are_released_unless_they_were_written_to(tmp_path):
  path = tmp_path / "file"
  path.write_bytes(b"x" * 2**26)
  with open(path, "r+b") as file:
    read = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    changed = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
  changed[:2] = b"yz"
  pages = slice(None, None, mmap.PAGESIZE)
  assert set(read[pages]) == set(b"x")  # all are there
  before = resident_bytes()
  release_file_pages()
  assert before - resident_bytes() > 0.9 * len(read)
  assert set(read[pages]) == set(b"x")
  assert changed[:3] == b"yzx"


def test_tensorflow_is_imported_without_the_pages_that_loading_it_read():
  shown = processes.python(
    "-c",
    "from palm_mtf.machine.process import own_process; own_process(); "
    "from palm_mtf import _tf; from palm_mtf.machine import host_memory as m; "
    "print(m.resident_bytes(), m.largest_resident_bytes())",
  )
  now, largest = map(int, shown.stdout.split())
  assert now < 0.75 * largest
  assert largest < 450e6


@pytest.mark.parametrize(
  ("variables", "expected"),
  [
    ({}, range(2, 3)),
    ({"MALLOC_ARENA_MAX": "5"}, range(5, 6)),
    ({"GLIBC_TUNABLES": "glibc.malloc.arena_max=7"}, range(6, 8)),
  ],
)
def test_threads_share_two_arenas_unless_the_user_has_said_how_many(
  variables, expected, monkeypatch
):
  for name in ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES"):
    monkeypatch.delenv(name, raising=False)
  shown = processes.python("-c", _THREADS, variables=variables)
  assert shown.stdout.count("<heap nr=") in expected
