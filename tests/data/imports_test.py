# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import subprocess
import sys


def test_text_becomes_batches_without_tensorflow():
  program = (
    "import sys, palm_mtf.data, palm_mtf.commands.vocab\n"
    "print([m for m in sys.modules if m.split('.')[0] in "
    "('tensorflow', 'mesh_tensorflow', 'gin', 'seqio', 'rich', 'jax')])"
  )
  result = subprocess.run(
    [sys.executable, "-c", program], capture_output=True, text=True, check=True
  )
  assert result.stdout == "[]\n"
