# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TensorFlow reads open weights even if their path is removed or replaced."""

import os
import shutil

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
