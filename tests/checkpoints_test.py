# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: whole or not there, the newest kept, space reserved."""

import os
import shutil

import pytest

from palm_mtf import checkpoints
from palm_mtf.errors import UserError

SHAPES = {"embedding": (4, 2), "final_norm/scale": (2,)}


def manifest(step):
  return checkpoints.Manifest(
    step=step,
    shapes=SHAPES,
    vocabulary_sha256="f00d",
    data={"SEED": 0},
    version="0",
  )


def write(model_dir, step, keep=10, text="weights"):
  def write_weights(prefix):
    with open(f"{prefix}.data", "w") as file:
      file.write(text)

  return checkpoints.write_checkpoint(
    str(model_dir), manifest(step), write_weights, keep
  )


def steps_of(model_dir):
  found = checkpoints.find_checkpoints(str(model_dir))
  return [checkpoint.manifest.step for checkpoint in found]


def test_manifest_is_read_as_it_was_written(tmp_path):
  written = write(tmp_path, 7)
  (found,) = checkpoints.find_checkpoints(str(tmp_path))
  assert found == written
  assert found.manifest == manifest(7)


def test_newest_is_the_last_by_number_not_by_name(tmp_path):
  for step in (100_000_000, 99_999_999, 5):
    write(tmp_path, step)
  assert steps_of(tmp_path) == [5, 99_999_999, 100_000_000]
  newest = checkpoints.newest_checkpoint(str(tmp_path), SHAPES)
  assert newest.manifest.step == 100_000_000


def test_only_the_newest_are_kept(tmp_path):
  for step in (1, 2, 3, 4):
    write(tmp_path, step, keep=2)
  assert steps_of(tmp_path) == [3, 4]
  assert len(os.listdir(tmp_path / "checkpoints")) == 2


@pytest.mark.parametrize(
  "damage, reason",
  [
    (lambda d: (d / "weights.data").write_text("wei"), "has 3 of 7 bytes"),
    (lambda d: (d / "weights.data").unlink(), "No such file"),
    (lambda d: (d / "manifest.json").unlink(), "No such file"),
    (lambda d: (d / "manifest.json").write_text("{"), "Expecting"),
    (lambda d: (d / "manifest.json").write_text("{}"), "file_bytes"),
  ],
  ids=["truncated", "no weights", "no manifest", "half manifest", "empty"],
)
def test_damaged_checkpoint_is_named_and_the_older_one_used(
  damage, reason, tmp_path, capsys
):
  write(tmp_path, 1)
  damaged = write(tmp_path, 2)
  damage(tmp_path / "checkpoints" / os.path.basename(damaged.path))
  newest = checkpoints.newest_checkpoint(str(tmp_path), SHAPES)
  assert newest.manifest.step == 1
  said = capsys.readouterr().err
  assert f"{damaged.path} is not whole" in said
  assert reason in said


def test_interrupted_write_leaves_nothing_and_keeps_the_older(tmp_path):
  write(tmp_path, 1)

  def interrupted(prefix):
    with open(f"{prefix}.data", "w") as file:
      file.write("half")
    raise KeyboardInterrupt

  with pytest.raises(KeyboardInterrupt):
    checkpoints.write_checkpoint(str(tmp_path), manifest(2), interrupted, 1)
  assert os.listdir(tmp_path / "checkpoints") == ["step_00000001"]


def test_a_checkpoint_that_was_not_whole_is_written_over(tmp_path):
  damaged = write(tmp_path, 1)
  os.unlink(f"{damaged.path}/weights.data")
  write(tmp_path, 1)
  assert steps_of(tmp_path) == [1]


def test_full_disk_is_one_line_with_the_folder_and_the_bytes(tmp_path):
  def full(prefix):
    with open("/dev/full", "w") as file:
      file.write("x")

  with pytest.raises(UserError) as error:
    checkpoints.write_checkpoint(str(tmp_path), manifest(3), full, 1)
  assert str(error.value) == (
    f"no disk space left for {tmp_path}/checkpoints/step_00000003, which needs "
    "up to 120 bytes; free some, or choose another folder."
  )
  assert not os.listdir(tmp_path / "checkpoints")


def test_disk_without_room_for_the_checkpoints_is_refused_before_training(
  tmp_path,
):
  nowhere = str(tmp_path / "not/there/yet")
  checkpoints.check_space(nowhere, SHAPES, keep=3, num_found=0)
  half = shutil.disk_usage(tmp_path).free // 24
  shapes = {"embedding": (half,)}
  with pytest.raises(UserError) as error:
    checkpoints.check_space(str(tmp_path), shapes, keep=3, num_found=0)
  needed = 4 * 12 * half
  assert f"room for 4 more, {needed:,} bytes, and its disk" in str(error.value)
  # Three of the four are there, and the fourth fits.
  checkpoints.check_space(str(tmp_path), shapes, keep=3, num_found=3)


def test_other_models_and_vocabularies_are_refused(tmp_path):
  checkpoint = write(tmp_path, 1)
  checkpoints.check_same_model(checkpoint, SHAPES, "f00d")
  with pytest.raises(UserError) as error:
    checkpoints.check_same_model(checkpoint, {**SHAPES, "embedding": (4, 3)})
  assert str(error.value) == (
    f"{checkpoint.path} has embedding [4, 2], the model wants [4, 3]: it is of "
    "another model; use the models/*.gin it was trained with, or another "
    "MODEL_DIR."
  )
  with pytest.raises(UserError, match="was trained with another vocabulary"):
    checkpoints.check_same_model(checkpoint, SHAPES, "beef")
