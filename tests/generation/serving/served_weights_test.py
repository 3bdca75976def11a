# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights are replaced by another checkpoint's, or stay.

Newer checkpoints are found once; damaged ones are skipped in one line.
"""

import dataclasses
import shutil

import numpy as np
import pytest

from palm_mtf.checkpoints.manifest import find_checkpoints
from palm_mtf.cli.gin_files import load_run
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.slot_decoder import SlotText
from palm_mtf.generation.serving.served_weights import (
  NewerCheckpoint,
  ServedWeights,
)
from tests.checkpoint_files import SHAPES, write


@pytest.fixture(scope="module")
def weights(finished):
  _, config = load_run("generate", str(finished), {})
  with ServedWeights(config, num_tokens=300, num_slots=2) as weights:
    yield weights


def log_probs(weights):
  """Returns log p of a prompt's tokens and of the next token."""
  prompt = [0, 260, 270, 280]
  weights.decoder.insert(0, prompt)
  text = SlotText(280, 3, 0, np.zeros([2], np.int32), 0.0, None, 1.0, 1)
  (chosen,) = weights.decoder.steps({0: text}, 1, wants_log_probs=True)[0]
  return [x.log_prob for x in (*weights.score(prompt), chosen)]


@pytest.mark.slow
def test_replaced_weights_are_the_newer_checkpoints(
  weights, finished, tmp_path, caplog
):
  first, *_, last = find_checkpoints(str(finished))
  weights.load(last)
  expected = log_probs(weights)
  weights.load(first)
  before = log_probs(weights)
  assert before != expected
  with caplog.at_level("INFO"):
    weights.replace(last)
  assert log_probs(weights) == expected
  assert weights.step == last.manifest.step and weights.created > 0
  assert caplog.messages[-1] == f"serving step {last.manifest.step}"
  # A checkpoint that cannot be read leaves the weights as they are.
  gone = dataclasses.replace(first, path=str(tmp_path / "gone"))
  weights.replace(gone)
  assert log_probs(weights) == expected
  assert weights.step == last.manifest.step
  assert f"{gone.path} cannot be loaded: " in caplog.text
  assert "Traceback" not in caplog.text


@pytest.mark.slow  # TensorFlow tries for 20 seconds
def test_a_cache_without_memory_is_one_error_line(
  weights, finished, monkeypatch
):
  checkpoint = find_checkpoints(str(finished))[-1]
  monkeypatch.setattr(weights, "_num_slots", 10**11)
  with pytest.raises(UserError, match="too little memory for their cache"):
    weights.load(checkpoint)


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
