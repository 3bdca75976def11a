# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A path names a checkpoint, a run or a TensorFlow file, or is refused."""

import os

import numpy as np
import pytest

from palm_mtf.checkpoints.locate import find_weights, read_shapes
from palm_mtf.errors import UserError
from tests.checkpoint_files import save_tensors, write


def test_a_run_is_its_newest_whole_checkpoint(tmp_path, capsys):
  first, second = write(tmp_path, 1), write(tmp_path, 2)
  for path in (second.path, f"{second.path}/", str(tmp_path)):
    assert find_weights("A", path).checkpoint == second
  with open(f"{second.path}/weights.data", "w") as file:
    file.write("weight5")
  found = find_weights("A", str(tmp_path))
  assert found.checkpoint == first
  assert found.place == first.path
  assert f"DAMAGED checkpoint {second.path}" in capsys.readouterr().err
  with pytest.raises(UserError, match=r"A = .*: is damaged: weights.data does"):
    find_weights("A", second.path)


def test_a_tensorflow_prefix_is_found_with_its_shapes(tmp_path):
  prefix = f"{tmp_path}/model.ckpt-7"
  save_tensors(prefix, embedding=np.zeros([4, 2], np.float32))
  for path in (prefix, f"{prefix}.index"):
    found = find_weights("A", path)
    assert (found.place, found.checkpoint) == (prefix, None)
    assert read_shapes(found) == {"embedding": (4, 2)}


@pytest.mark.parametrize(
  "path", ["runs/frist", "nowhere/at/all", "step_000005"]
)
def test_where_nothing_is_an_error_says_what_was_given(
  path, tmp_path, monkeypatch
):
  monkeypatch.chdir(tmp_path)
  (tmp_path / "runs" / "first").mkdir(parents=True)
  with pytest.raises(UserError) as error:
    find_weights("INIT_CHECKPOINT", path)
  assert f"INIT_CHECKPOINT = {path!r}: there is no checkpoint" in str(
    error.value
  )
  assert ('"first"' in str(error.value)) == (path == "runs/frist")


def test_numbers_that_are_no_weights_are_refused_by_name(tmp_path):
  save_tensors(tmp_path / "model", embedding=np.zeros([4], np.int32))
  with pytest.raises(UserError, match="its embedding is int32"):
    read_shapes(find_weights("A", str(tmp_path / "model")))


def test_a_fifo_at_the_place_of_tensorflows_data_is_never_waited_for(tmp_path):
  save_tensors(tmp_path / "model", embedding=np.zeros([4], np.float32))
  (data,) = tmp_path.glob("model.data-*")
  data.unlink()
  os.mkfifo(data)
  with pytest.raises(UserError, match=f"A = .*: cannot read {data}: is a FIFO"):
    find_weights("A", str(tmp_path / "model"))


def test_a_file_that_tensorflow_cannot_read_is_one_line(tmp_path):
  (tmp_path / "model.index").write_text("no index")
  with pytest.raises(UserError, match=r"A = .*: TensorFlow cannot read it: ."):
    read_shapes(find_weights("A", str(tmp_path / "model")))
