# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A round of chaos ends with the same bits; a difference is reported."""

import shutil

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import find_checkpoints
from palm_mtf.checkpoints.variables import write_arrays
from palm_mtf.checkpoints.writer import write_checkpoint
from tests import processes, runs
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


def test_one_bit_of_a_tensor_is_told_whatever_the_files(finished, tmp_path):
  run = tmp_path / "run"
  shutil.copytree(finished, run)
  newest = find_checkpoints(str(run))[-1]
  tensors = runs.load(newest.prefix)

  def write():
    write_checkpoint(
      str(run),
      newest.manifest,
      lambda prefix: write_arrays(prefix, tensors),
      keep=10,
    )

  write()  # into one file, in another order
  check_same(finished, run, files=False)
  tensors["embedding"].view(np.int32)[0, 0] ^= 1
  write()
  with pytest.raises(
    WrongEndError, match=r"bits: checkpoints/step_0+12/embedding$"
  ):
    check_same(finished, run, files=False)


def test_wrong_minutes_are_one_line(run_tool):
  code, out, err = run_tool("chaos", "--minutes=-1")
  assert (code, out) == (2, "")
  assert err == "chaos: --minutes = -1.0: give a number of minutes above 0.\n"
