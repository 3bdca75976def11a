# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The optimizer's slots and their bytes; from which slots a run can resume."""

import dataclasses
import math

import pytest

from palm_mtf.accounting.optimizer_state import (
  check_same_slots,
  checkpoint_bytes,
  parameter_slots,
)
from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.errors import UserError
from tests.mtf_testing import PALM_OPTIMIZER as PALM
from tests.mtf_testing import small_config

FACTORED = dataclasses.replace(PALM, second_moment="factored", beta1=0.0)
SHAPES = parameter_shapes(
  small_config(
    num_layers=1, d_model=3, num_heads=5, d_kv=2, d_ff=7, vocab_size=11
  )
)
NUM_PARAMETERS = 33 + 3 + 30 + 6 + 6 + 30 + 21 + 21 + 21 + 3


def slot_shapes(optimizer):
  return {
    f"{name}/{slot.name}": shape[slot.dims]
    for name, shape in SHAPES.items()
    for slot in parameter_slots(name, len(shape), optimizer)
  }


def test_palm_keeps_two_slots_of_the_shape_of_each_parameter():
  assert slot_shapes(PALM) == {
    f"{name}/{slot}": shape
    for name, shape in SHAPES.items()
    for slot in ("second_moment", "momentum")
  }


def test_factored_keeps_rows_and_columns_of_matrices_alone():
  rows_and_columns = {
    "embedding": [(11,), (3,)],
    "layer_000/attention/q": [(3,), (5, 2)],
    "layer_000/attention/k": [(3,), (2,)],
    "layer_000/attention/v": [(3,), (2,)],
    "layer_000/attention/o": [(5, 2), (3,)],
    "layer_000/mlp/wi_gate": [(3,), (7,)],
    "layer_000/mlp/wi": [(3,), (7,)],
    "layer_000/mlp/wo": [(7,), (3,)],
  }
  expected = {
    f"{name}/second_moment_{part}": shape
    for name, shapes in rows_and_columns.items()
    for part, shape in zip(("row", "column"), shapes, strict=True)
  }
  for name in ("layer_000/norm/scale", "final_norm/scale"):
    expected[f"{name}/second_moment"] = (3,)
  assert slot_shapes(FACTORED) == expected


@pytest.mark.parametrize(
  ("changes", "num_bytes"),
  [
    ({}, 12 * NUM_PARAMETERS),
    ({"beta1": 0.0}, 8 * NUM_PARAMETERS),
    ({"momentum_dtype": "bfloat16"}, 10 * NUM_PARAMETERS),
    (
      {"second_moment": "factored", "beta1": 0.0},
      4 * (NUM_PARAMETERS + 14 + 3 + 13 + 5 + 5 + 13 + 10 + 10 + 10 + 3),
    ),
  ],
  ids=["PaLM", "no momentum", "momentum in bfloat16", "factored, no momentum"],
)
def test_bytes_of_a_checkpoint_follow_the_slots(changes, num_bytes):
  optimizer = dataclasses.replace(PALM, **changes)
  assert checkpoint_bytes(SHAPES, optimizer) == num_bytes


def test_frozen_parameters_have_no_slots_in_checkpoints():
  slots = checkpoint_bytes(SHAPES, PALM) - checkpoint_bytes(
    SHAPES, PALM, ["embedding"]
  )
  assert slots == 2 * 4 * math.prod(SHAPES["embedding"])


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    (
      {"second_moment": "factored"},
      "SECOND_MOMENT = 'factored': runs/a was written with 'full', so its "
      "moments do not fit; keep that value, or start a new optimizer from "
      "its weights in another MODEL_DIR, as INIT_CHECKPOINT with INIT_STATE = "
      '"weights".',
    ),
    ({"beta1": 0.0}, "BETA1 = 0.0: runs/a was written with 0.9, so"),
    (
      {"momentum_dtype": "bfloat16"},
      "MOMENTUM_DTYPE = 'bfloat16': runs/a was written with 'float32', so",
    ),
  ],
)
def test_other_slots_are_refused_by_the_setting(changes, message):
  settings = {k.upper(): v for k, v in dataclasses.asdict(PALM).items()}
  with pytest.raises(UserError) as error:
    check_same_slots("runs/a", settings, dataclasses.replace(PALM, **changes))
  assert str(error.value).startswith(message)


@pytest.mark.parametrize(
  ("held", "changes"),
  [
    (PALM, {}),
    (PALM, {"beta1": 0.8}),
    (PALM, {"learning_rate": 1.0}),
    (PALM, {"update_clip": None}),
    (FACTORED, {"momentum_dtype": "bfloat16"}),  # of no momentum
  ],
)
def test_settings_that_change_no_slot_may_change(held, changes):
  settings = {k.upper(): v for k, v in dataclasses.asdict(held).items()}
  check_same_slots("runs/a", settings, dataclasses.replace(held, **changes))
