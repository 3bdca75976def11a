# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""INIT_CHECKPOINT is used as asked, or is an error before training."""

import types

import numpy as np
import pytest

from palm_mtf.checkpoints import initial_weights
from palm_mtf.checkpoints.initial_weights import find_initial_weights
from palm_mtf.checkpoints.locate import find_weights
from palm_mtf.config import DataConfig
from palm_mtf.errors import UserError
from tests.checkpoint_files import SHAPES, save_tensors, write

DATA = DataConfig(text_files="*.txt", vocabulary=None, validation_share=0.1)


def test_what_is_not_asked_for_or_not_needed_is_not_read(tmp_path, capsys):
  assert find_initial_weights(None, None, SHAPES) is None
  own = write(tmp_path, 3)
  assert find_initial_weights("/not/there", own, SHAPES) is None
  assert (
    f"INIT_CHECKPOINT is not read: {own.path} is this run's own"
  ) in capsys.readouterr().err


def test_another_model_is_refused_with_names_and_shapes(tmp_path):
  path = write(tmp_path, 3).path
  with pytest.raises(UserError) as error:
    find_initial_weights(path, None, {**SHAPES, "embedding": (5, 2)})
  assert str(error.value).startswith(
    f"INIT_CHECKPOINT = {path!r}: {path} has embedding [4, 2], the model wants "
    "[5, 2]: it is of another model"
  )


def test_a_tensorflow_file_needs_all_parameters_and_no_others(tmp_path):
  scale, embedding = np.zeros([2], np.float32), np.zeros([4, 2], np.float32)
  tensors = {
    "embedding": embedding,
    "embedding__second_moment": embedding,
    "embedding__momentum": embedding,
    "final_norm__scale": scale,
  }
  save_tensors(tmp_path / "good", **tensors)
  good = find_initial_weights(str(tmp_path / "good"), None, SHAPES)
  assert good.place == str(tmp_path / "good")
  save_tensors(tmp_path / "more", **tensors, layer_000__norm__scale=scale)
  with pytest.raises(UserError, match=r"layer_000/norm/scale \[2\], the model"):
    find_initial_weights(str(tmp_path / "more"), None, SHAPES)
  save_tensors(tmp_path / "other", w=scale)
  with pytest.raises(UserError, match="has embedding nothing, the model wants"):
    find_initial_weights(str(tmp_path / "other"), None, SHAPES)


def test_a_file_that_says_no_step_has_no_state_to_go_on_with(tmp_path):
  save_tensors(tmp_path / "file", embedding=np.zeros([4, 2], np.float32))
  path = str(tmp_path / "file")
  weights = find_weights("INIT_CHECKPOINT", path)
  with pytest.raises(UserError) as error:
    initial_weights.whole_state(weights, run=None, optimizer=None)
  assert str(error.value) == (
    f'INIT_CHECKPOINT = {path!r}: INIT_STATE = "all", and a checkpoint of '
    "TensorFlow does not say its step; give one of palm_mtf, or set INIT_STATE "
    'to "weights".'
  )


def test_weights_without_their_vocabulary_are_refused(tmp_path, capsys):
  theirs, mine = tmp_path / "theirs", tmp_path / "mine"
  path = write(theirs, 3).path
  weights = find_initial_weights(path, None, SHAPES)
  given = f"INIT_CHECKPOINT = {path!r}"
  for hint in ("", f", such as '{theirs}/vocabulary.model'"):
    with pytest.raises(UserError) as error:
      initial_weights.check_vocabulary_given(weights, str(mine), DATA)
    assert str(error.value) == (
      f"VOCABULARY = None: {given} was trained with a vocabulary of its own; "
      f"set VOCABULARY to it{hint}."
    )
    (theirs / "vocabulary.model").write_text("pieces")
  mine.mkdir()
  (mine / "vocabulary.model").write_text("pieces")
  initial_weights.check_vocabulary_given(weights, str(mine), DATA)
  same, other = (types.SimpleNamespace(sha256=x) for x in ("f00d", "beef"))
  initial_weights.check_same_vocabulary(weights, same)
  with pytest.raises(UserError, match="was trained with another vocabulary"):
    initial_weights.check_same_vocabulary(weights, other)
