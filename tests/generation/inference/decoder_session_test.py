# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint becomes the weights of a session."""

import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.generate_program import build_decode_model
from palm_mtf.generation.inference.decoder_session import load_weights
from palm_mtf.mesh.session import session_config
from tests import oracle
from tests.mtf_testing import (
  SINGLE,
  load_parameters,
  mesh_layout,
  small_config,
)


@pytest.mark.parametrize(
  ("layout", "weight_dtype"),
  [
    (None, "activation"),
    (None, "int4"),
    ("all over data and model", "int8"),
  ],
)
def test_no_two_layers_of_a_checkpoint_are_in_memory_at_once(
  layout, weight_dtype
):
  config = small_config()
  params = oracle.random_parameters(config, seed=3)
  mesh = mesh_layout(layout) if layout else SINGLE
  in_session = session_config(mesh.num_devices)
  restored = []

  def are_there():
    return session.run(
      [
        tf.raw_ops.VarIsInitializedOp(resource=part.variable.handle)
        for slices in restored
        for parts in slices.values()
        for part in parts
      ]
    )

  def restore(slices):
    assert not any(are_there())
    restored.append(slices)
    load_parameters(session, slices, {name: params[name] for name in slices})
    assert any(are_there())

  with tf.Graph().as_default(), tf.Session(config=in_session) as session:
    model = build_decode_model(config, mesh, weight_dtype)
    load_weights(session, model, restore)
    assert not any(are_there())
  assert {name for slices in restored for name in slices} == params.keys()
  assert len(restored) == config.num_layers + 1
