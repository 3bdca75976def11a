# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checkpoints carry no layout."""

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


def save_again(mesh, path, restore_from=""):
  """Starts a program under `mesh`, restores if asked, and saves to `path`."""
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      small_config(), mesh, PALM_OPTIMIZER, batch_size=4, seed=8
    )
    if restore_from:
      restorer = build_restorer(program.slices)
      session.run(restorer.restore, {restorer.prefix: restore_from})
    else:
      session.run(program.initialize)
    WeightsCopier(session, program.slices).copy()(path)
  reader = tf2.train.load_checkpoint(path)
  return {n: reader.get_tensor(n) for n in reader.get_variable_to_shape_map()}


@pytest.mark.parametrize("layout", LAYOUTS)
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
