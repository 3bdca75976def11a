# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of other models and vocabularies are refused, with a reason."""

import pytest

from palm_mtf.checkpoints.same_model import check_same_model, shape_differences
from palm_mtf.errors import UserError
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
