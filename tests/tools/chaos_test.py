# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A round of chaos ends with the same bits; a difference is reported."""

import shutil

import pytest

from tests import processes
from tools.chaos import WrongEndError, check_same


@pytest.mark.slow
def test_a_run_under_faults_ends_with_the_bits_of_one_left_in_peace():
  done = processes.python(
    *("-m", "tools.chaos", "--minutes=0.2"), cwd=processes.ROOT
  )
  assert done.returncode == 0, done.stderr
  rounds = done.stderr.count("the same bits")
  assert f"{rounds:6} round" in done.stdout.splitlines()


@pytest.mark.parametrize(
  "name", ["samples.jsonl", "checkpoints/step_00000012/weights.index"]
)
def test_one_bit_that_differs_is_told_with_its_file(finished, tmp_path, name):
  run = tmp_path / "run"
  shutil.copytree(finished, run)
  check_same(finished, run, files=True)
  content = bytearray((run / name).read_bytes())
  content[-1] ^= 1
  (run / name).write_bytes(content)
  with pytest.raises(WrongEndError, match=f"not the same bits: {name}$"):
    check_same(finished, run, files=True)
