# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Each test measures its own process, whose memory no other test changes.

_tf_test.py measures the import of TensorFlow.
"""

from tests import processes

_WRITES = """
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
before = resident_bytes()
held = bytearray(b"x") * 2**27
size = len(held)
assert 0.9 * size < resident_bytes() - before < 1.5 * size
del held
assert largest_resident_bytes() > before + 0.9 * size
"""
_READS = """
import mmap, sys
from palm_mtf.machine.host_memory import release_file_pages, resident_bytes
with open(sys.argv[1], "r+b") as file:
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
"""


def test_what_is_written_to_counts_and_its_largest_stays_when_given_back():
  done = processes.python("-c", _WRITES)
  assert done.returncode == 0, done.stderr


def test_the_largest_is_of_this_process_alone():
  held = bytearray(b"x") * 2**27
  program = (
    "from palm_mtf.machine import host_memory as memory; "
    "print(memory.largest_resident_bytes())"
  )
  assert int(processes.python("-c", program).stdout) < len(held)


def test_pages_of_files_are_released_unless_they_were_written_to(tmp_path):
  path = tmp_path / "file"
  path.write_bytes(b"x" * 2**26)
  done = processes.python("-c", _READS, path)
  assert done.returncode == 0, done.stderr
