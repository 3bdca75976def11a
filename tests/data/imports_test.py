# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
from tests.data.processes import output_of


def test_text_becomes_batches_without_tensorflow():
  program = (
    "import sys, palm_mtf.data, palm_mtf.commands.vocab\n"
    "print([m for m in sys.modules if m.split('.')[0] in "
    "('tensorflow', 'mesh_tensorflow', 'gin', 'seqio', 'rich', 'jax')])"
  )
  assert output_of(program) == "[]\n"
