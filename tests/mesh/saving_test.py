# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints carry no layout."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf2

from palm_mtf._tf import tf
from palm_mtf.mesh.placement import session_config
from palm_mtf.mesh.saving import build_restorer
from palm_mtf.pods.program import build_train_program
from palm_mtf.variable_files import WeightsCopier
from tests.mtf_testing import (
  LAYOUTS,
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  small_config,
)

# Those with a cut through rows, through columns, and through both.
QUICK = ("padded vocab over three", "PaLM's 2D")


def save_again(mesh, path, restore_from="", optimizer=PALM_OPTIMIZER):
  """Starts a program under `mesh`, restores if asked, and saves to `path`."""
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      small_config(num_layers=1), mesh, optimizer, batch_size=4, seed=8
    )
    if restore_from:
      restorer = build_restorer([program.slices], "/device:cpu:0")
      session.run(restorer.restore, {restorer.prefix: restore_from})
    else:
      session.run(program.initialize)
    WeightsCopier(session, program.slices).copy()(path)
  reader = tf2.train.load_checkpoint(path)
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize(
  "layout",
  [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in LAYOUTS
  ],
)
def test_first_weights_and_checkpoints_are_the_same_bits_under_every_layout(
  layout, tmp_path
):
  mesh = mesh_layout(layout)
  single = save_again(SINGLE, str(tmp_path / "single"))
  split = save_again(mesh, str(tmp_path / "split"))
  to_split = save_again(mesh, str(tmp_path / "b"), str(tmp_path / "single"))
  to_single = save_again(SINGLE, str(tmp_path / "c"), str(tmp_path / "split"))
  for other in (split, to_split, to_single):
    assert other.keys() == single.keys()
    for name, value in single.items():
      np.testing.assert_array_equal(other[name], value, err_msg=name)
  assert single["embedding"].std() > 0.5


def test_checkpoints_hold_the_slots_of_other_forms_in_their_dtypes(tmp_path):
  optimizer = dataclasses.replace(
    PALM_OPTIMIZER, second_moment="factored", momentum_dtype="bfloat16"
  )
  mesh, path = mesh_layout("all over data and model"), str(tmp_path / "a")
  split = save_again(mesh, path, optimizer=optimizer)
  single = save_again(SINGLE, str(tmp_path / "b"), path, optimizer)
  o = "layer_000/attention/o"
  assert {n: x.shape for n, x in split.items() if n.startswith(o)} == {
    o: (4, 10, 24),
    f"{o}/momentum": (4, 10, 24),
    f"{o}/second_moment_row": (4, 10),
    f"{o}/second_moment_column": (24,),
  }
  for name, value in split.items():
    kept = tf.bfloat16 if name.endswith("momentum") else tf.float32
    assert value.dtype == kept.as_numpy_dtype, name
    np.testing.assert_array_equal(single[name], value, err_msg=name)
