# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys

from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes


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
