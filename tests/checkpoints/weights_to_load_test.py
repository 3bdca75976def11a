# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""INIT_CHECKPOINT is used as asked, or is an error before training."""

import dataclasses
import os
import types

import numpy as np
import pytest

from palm_mtf.checkpoints import weights_to_load
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.named_weights import find_weights, read_shapes
from palm_mtf.checkpoints.weights_to_load import (
  find_initial_weights,
  shape_differences,
  warn_of_other_evaluation_text,
  warn_of_other_split,
)
from palm_mtf.config import DataConfig
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.errors import UserError
from tests import checkpoint_files
from tests.checkpoint_files import SHAPES, save_tensors, write
from tests.refusals import message_of

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
  assert message_of(
    find_initial_weights, path, None, {**SHAPES, "embedding": (5, 2)}
  ).startswith(
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


def test_a_file_that_says_no_step_has_no_state_to_resume(tmp_path):
  save_tensors(tmp_path / "file", embedding=np.zeros([4, 2], np.float32))
  path = str(tmp_path / "file")
  weights = find_weights("INIT_CHECKPOINT", path)
  assert message_of(
    weights_to_load.find_initial_state, weights, run=None, optimizer=None
  ) == (
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
    assert message_of(
      weights_to_load.check_vocabulary_given, weights, str(mine), DATA
    ) == (
      f"VOCABULARY = None: {given} was trained with another vocabulary; name "
      f"that vocabulary in VOCABULARY{hint}."
    )
    (theirs / "vocabulary.model").write_text("pieces")
  mine.mkdir()
  (mine / "vocabulary.model").write_text("pieces")
  weights_to_load.check_vocabulary_given(weights, str(mine), DATA)
  same, other = (types.SimpleNamespace(sha256=x) for x in ("f00d", "beef"))
  weights_to_load.check_same_vocabulary(weights, same)
  with pytest.raises(UserError, match="was trained with another vocabulary"):
    weights_to_load.check_same_vocabulary(weights, other)


def test_a_run_is_its_newest_whole_checkpoint(tmp_path, capsys):
  first, second = write(tmp_path, 1), write(tmp_path, 2)
  prefix = f"{second.path}/weights"  # TensorFlow's, of our own checkpoint
  for path in (second.path, f"{second.path}/", str(tmp_path), prefix):
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


def test_differences_are_the_first_three_and_how_many_more():
  held = {"a": (1,), "b": (2,), "c": (3,), "d": (4,)}
  wanted = {"a": (2,), "b": (2,), "e": (5,), "f": ()}
  assert shape_differences(held, held) == ""
  assert shape_differences(held, wanted) == (
    "a [1], the model wants [2]; e nothing, the model wants [5]; "
    "f nothing, the model wants []; and 2 more"
  )


def corpus(text, packing="joined", sequence_length=32):
  return Corpus(
    sources=[types.SimpleNamespace(name="mine", rate=1.0)],
    stores=[types.SimpleNamespace(fingerprint=text)],
    packing=packing,
    sequence_length=sequence_length,
    eod_id=0,
    seed=0,
  )


def trained_on(text, share):
  manifest = dataclasses.replace(
    checkpoint_files.manifest(8),
    data={
      "PACKING": "joined",
      "SEQUENCE_LENGTH": 32,
      "the tokens": corpus(text).fingerprint,
    },
    settings={"VALIDATION_SHARE": share},
  )
  return Checkpoint("run/step_00000008", manifest, files={}, blake2b="f00d")


# After training with share 0.2: the text and share now, and the warning.
EVALUATION = [
  ("at 0.2", 0.2, ""),
  ("at 0.5", 0.5, "0.5, but 0.2 in training: part of the validation text was "
   "trained on"),
  ("at 0.1", 0.1, "0.1, but 0.2 in training: the validation loss covers only "
   "a part of the text that was held out"),
  ("edited", 0.2, "the text or its tokens have changed since run/step_00000008 "
   "was trained: the validation text may have been trained on"),
  # The share does not apply to a task with a validation split.
  ("at 0.2", 0.5, ""),
]  # fmt: skip
RESUMED = [
  ("at 0.2", 0.2, ""),
  ("at 0.5", 0.5, "0.5, but 0.2 until now: text that was trained on is held "
   "out from here on, and validation losses are too low"),
  ("at 0.1", 0.1, "0.1, but 0.2 until now: text that was held out becomes "
   "training text"),
  ("edited", 0.2, ""),  # another warning says that batches differ
  ("at 0.2", 0.1, ""),
]  # fmt: skip


@pytest.mark.parametrize(
  ("warn", "text", "share", "said"),
  [(warn_of_other_evaluation_text, *each) for each in EVALUATION]
  + [(warn_of_other_split, *each) for each in RESUMED],
)
def test_a_changed_validation_split_warns(warn, text, share, said, caplog):
  data = DataConfig(text_files="a", vocabulary=None, validation_share=share)
  warn(trained_on("at 0.2", 0.2), corpus(text), data)
  assert len(caplog.records) == bool(said)
  assert said in caplog.text


def test_other_rows_of_the_same_text_are_no_other_text(caplog):
  data = DataConfig(text_files="a", vocabulary=None, validation_share=0.2)
  rows = corpus("at 0.2", packing="packed", sequence_length=64)
  warn_of_other_evaluation_text(trained_on("at 0.2", 0.2), rows, data)
  warn_of_other_split(trained_on("at 0.2", 0.2), rows, data)
  assert not caplog.records
