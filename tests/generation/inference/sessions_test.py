# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint is loaded layer by layer; a mean loss covers all batches."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode import weight_maker
from palm_mtf.generation.decode.weight_maker import build_decode_model
from palm_mtf.generation.inference import sessions
from palm_mtf.generation.inference.sessions import (
  LoadedDecoder,
  compute_mean_loss,
  load_weights,
)
from palm_mtf.mesh.session import session_config
from palm_mtf.runtime.client.client import Client
from tests import oracle
from tests.decode_testing import save_checkpoint
from tests.mtf_testing import (
  SINGLE,
  load_parameters,
  mesh_layout,
  random_documents,
  small_config,
)


@pytest.mark.parametrize(
  ("layout", "weight_dtype", "most_bytes", "times"),
  [
    (None, "activation", 0, 3),
    ("all over data and model", "int8", 0, 3),
    (None, "activation", 2**26, 1),
  ],
)
def test_no_two_layers_of_a_checkpoint_are_in_memory_at_once_unless_small(
  layout, weight_dtype, most_bytes, times, monkeypatch
):
  monkeypatch.setattr(weight_maker, "_MOST_BYTES", most_bytes)
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
    load_weights(Client(session), model.layers, restore)
    assert not any(are_there())
  assert {name for slices in restored for name in slices} == params.keys()
  assert len(restored) == times


def test_the_graph_does_not_grow_while_layers_are_loaded(tmp_path, monkeypatch):
  """A session copies its graph when the graph grows: 30 copies took seconds."""
  config = small_config()
  params = oracle.random_parameters(config, seed=4)
  sizes = []

  def load(client, layers, restore):
    def count_and_restore(slices):
      sizes.append(client.graph.num_operations())
      restore(slices)

    load_weights(client, layers, count_and_restore)
    sizes.append(client.graph.num_operations())

  monkeypatch.setattr(sessions, "load_weights", load)
  monkeypatch.setattr(weight_maker, "_MOST_BYTES", 0)
  checkpoint = save_checkpoint(config, params, tmp_path)
  with LoadedDecoder(checkpoint, config, SINGLE):
    assert len(sizes) == config.num_layers + 2
  assert len({*sizes}) == 1


def test_mean_loss_is_the_total_of_all_batches_over_their_weight(tmp_path):
  config = small_config()
  params = oracle.random_parameters(config, seed=1)
  batches = [random_documents(config, batch_size=2, seed=s) for s in (2, 3)]
  batches[0]["loss_weights"][:, 1:] = 0
  checkpoint = save_checkpoint(config, params, tmp_path)
  mean = compute_mean_loss(checkpoint, config, SINGLE, batches)
  both = {
    name: np.concatenate([batch[name] for batch in batches])
    for name in batches[0]
  }
  exact, _ = oracle.loss(config, params, **both, z_loss=0.0)
  assert mean == pytest.approx(exact, rel=1e-6)
  losses = [oracle.loss(config, params, **b, z_loss=0.0)[0] for b in batches]
  assert np.mean(losses) != pytest.approx(exact, rel=1e-3)
