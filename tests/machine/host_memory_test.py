# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import mmap
import subprocess
import sys

from palm_mtf.machine.host_memory import (
  largest_resident_bytes,
  release_file_pages,
  resident_bytes,
)
from tests import processes


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
  assert set(read[pages]) == set(b"x")  # reads all pages
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
    # Without the compiled code that earlier tests left in their cache.
    variables={"TF_XLA_FLAGS": ""},
  )
  now, largest = map(int, shown.stdout.split())
  assert now < 0.75 * largest
  assert largest < 450e6
