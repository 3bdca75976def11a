# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other models and vocabularies are refused, with a reason."""

import dataclasses
import types

import pytest

from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.same_model import (
  check_same_model,
  shape_differences,
  warn_of_other_evaluation_text,
  warn_of_other_split,
)
from palm_mtf.config import DataConfig
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.errors import UserError
from tests import checkpoint_files
from tests.checkpoint_files import SHAPES, write


def test_other_models_and_vocabularies_are_refused(tmp_path):
  checkpoint = write(tmp_path, 1)
  check_same_model(checkpoint, SHAPES, "f00d")
  with pytest.raises(UserError) as error:
    check_same_model(checkpoint, {**SHAPES, "embedding": (4, 3)})
  assert str(error.value) == (
    f"{checkpoint.path} has embedding [4, 2], the model wants [4, 3]: it is of "
    "another model; use the models/*.gin it was trained with, or another "
    "MODEL_DIR."
  )
  with pytest.raises(UserError, match="was trained with another vocabulary"):
    check_same_model(checkpoint, SHAPES, "beef")


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
