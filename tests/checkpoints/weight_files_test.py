# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow reads open weights even if their path is removed or replaced."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

from palm_mtf.checkpoints import weight_files
from palm_mtf.checkpoints.weight_files import OpenWeights
from tests import runs
from tests.checkpoint_files import save_tensors

WEIGHTS = np.arange(6, dtype=np.float32)


@pytest.mark.parametrize("name", ["plain", "lr[0.01]", "a*?", "{a,b} c\\d"])
def test_files_of_any_name_are_read_when_their_folder_is_gone(name, tmp_path):
  folder = tmp_path / name
  save_tensors(folder / "weights", x=WEIGHTS)
  files = OpenWeights(str(folder / "weights"))
  shutil.rmtree(folder)
  assert (runs.load(files.prefix)["x"] == WEIGHTS).all()
  links = os.path.dirname(files.prefix)
  assert os.listdir(links)
  del files
  assert not os.path.exists(links)


OPEN_AND_DIE = """
import os, signal, sys
from palm_mtf.checkpoints.weight_files import OpenWeights
files = OpenWeights(sys.argv[1])
print(files.prefix, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_links_of_a_killed_process_are_removed_by_the_next(
  tmp_path, monkeypatch
):
  temporary = tmp_path / "temporary"
  temporary.mkdir()
  monkeypatch.setenv("TMPDIR", str(temporary))
  monkeypatch.setattr(weight_files.tempfile, "tempdir", None)
  (tmp_path / "weights.index").touch()
  prefix = str(tmp_path / "weights")
  running = OpenWeights(prefix)
  killed = subprocess.run(
    [sys.executable, "-c", OPEN_AND_DIE, prefix], stdout=subprocess.PIPE
  )
  assert killed.returncode == -signal.SIGKILL
  left = pathlib.Path(os.fsdecode(killed.stdout).strip()).parent
  kept = pathlib.Path(running.prefix).parent
  assert {*temporary.iterdir()} == {left, kept}
  files = OpenWeights(prefix)
  assert {*temporary.iterdir()} == {kept, pathlib.Path(files.prefix).parent}
  assert os.listdir(kept) == ["weights.index"]
  files.close()
  running.close()
  assert not any(temporary.iterdir())


def test_without_a_temporary_folder_files_are_read_at_their_own_path(
  tmp_path, monkeypatch
):
  save_tensors(tmp_path / "weights", x=WEIGHTS)

  def refuse(**unused):
    raise FileNotFoundError("No usable temporary directory found")

  monkeypatch.setattr(weight_files.tempfile, "TemporaryDirectory", refuse)
  files = OpenWeights(str(tmp_path / "weights"))
  assert files.prefix == str(tmp_path / "weights")
  with pytest.raises(FileNotFoundError):
    files.path("weights.other")
