# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Newer checkpoints are found once; damaged ones are skipped in one line."""

import shutil

import pytest

from palm_mtf.generation.serving.newer_checkpoint import NewerCheckpoint
from tests.checkpoint_files import SHAPES, write


@pytest.fixture
def newer(tmp_path):
  return NewerCheckpoint(str(tmp_path), write(tmp_path, 1), SHAPES, "f00d")


def damage(checkpoint):
  with open(f"{checkpoint.path}/weights.data", "r+") as file:
    file.write("W")  # the same number of bytes


def test_a_newer_checkpoint_is_found_once(newer, tmp_path):
  assert newer.find() is None
  write(tmp_path, 2)
  assert newer.find().manifest.step == 2
  assert newer.find() is None
  write(tmp_path, 3)
  write(tmp_path, 4)
  assert newer.find().manifest.step == 4
  assert newer.find() is None


def test_a_found_checkpoint_stays_readable_when_it_is_removed(newer, tmp_path):
  found = write(tmp_path, 2).path and newer.find()
  shutil.rmtree(found.path)
  with open(f"{found.prefix}.data") as file:
    assert file.read() == "weights"


def test_a_damaged_checkpoint_is_skipped_with_one_line(newer, tmp_path, caplog):
  second, third = write(tmp_path, 2), write(tmp_path, 3)
  damage(third)
  assert newer.find().manifest.step == 2
  assert newer.find() is None and newer.find() is None
  (record,) = caplog.records
  assert record.getMessage() == (
    f"{third.path} is not served: weights.data does not hold the bytes that "
    "were written"
  )
  damage(second)  # it is served, and already read
  assert newer.find() is None
  shutil.rmtree(third.path)
  write(tmp_path, 3)
  assert newer.find().manifest.step == 3


def test_a_checkpoint_of_another_model_or_vocabulary_is_skipped(
  tmp_path, caplog
):
  served = write(tmp_path, 1)
  write(tmp_path, 2)
  other = {**SHAPES, "embedding": (9, 2)}
  for shapes, vocabulary in ((other, "f00d"), (SHAPES, "other")):
    newer = NewerCheckpoint(str(tmp_path), served, shapes, vocabulary)
    assert newer.find() is None
  model, vocabulary = (record.getMessage() for record in caplog.records)
  assert "it is of another model" in model
  assert "another vocabulary" in vocabulary


def test_a_run_that_went_back_is_followed_back(newer, tmp_path):
  write(tmp_path, 2)
  newest = newer.find()
  shutil.rmtree(newest.path)
  assert newer.find().manifest.step == 1


def test_a_missing_folder_is_no_newer_checkpoint(newer, tmp_path):
  shutil.rmtree(tmp_path)
  assert newer.find() is None
