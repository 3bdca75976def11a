# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
from palm_mtf.memory import resident_bytes


def test_what_is_written_to_is_in_memory():
  before = resident_bytes()
  held = bytearray(b"x") * 2**27
  assert 0.9 * len(held) < resident_bytes() - before < 1.5 * len(held)
