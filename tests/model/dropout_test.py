# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Dropout: masks from the place in the global batch, however it is cut."""

import dataclasses

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.mesh.session import session_config
from palm_mtf.model.dropout import DROPOUT_STATE, Dropout
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import TrainStep
from tests import oracle
from tests.mtf_testing import (
  SINGLE,
  load_parameters,
  lower,
  mesh_layout,
  placement,
  random_documents,
  random_tokens,
  relative_error,
  small_config,
  train,
)
from tests.settings import PALM_LOSS, step_config

ROWS, LENGTH, WIDTH = 8, 16, 33
DROPPING = dataclasses.replace(PALM_LOSS, dropout=0.1)
CONFIG = small_config(num_layers=1)


def dropped(
  x,
  *,
  rate=0.1,
  seed=1,
  step=0,
  place=1,
  first_row=0,
  is_on=1,
  places_before=0,
  mesh=SINGLE,
):
  """Returns x after dropout, and the gradient of its sum of squares."""
  with tf.Graph().as_default():
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    sizes = zip(("batch", "length", "d_model"), x.shape, strict=True)
    dims = [mtf.Dimension(*each) for each in sizes]
    state = tf.constant([step, first_row, is_on, places_before])
    shape = mtf.Shape([DROPOUT_STATE])
    state = mtf.import_tf_tensor(mtf_mesh, state, shape)
    given = mtf.import_tf_tensor(mtf_mesh, tf.constant(x), mtf.Shape(dims))
    y = Dropout(rate, seed, state)(given, place)
    (dx,) = mtf.gradients([mtf.reduce_sum(mtf.square(y))], [given])
    lowered = lower({mtf_mesh: placement(mesh)}, {"y": y, "dx": dx})
    with tf.Session(config=session_config(mesh.num_devices)) as session:
      values = session.run(lowered.tensors)
  return values["y"], values["dx"]


def ones(rows=ROWS):
  return np.ones([rows, LENGTH, WIDTH], np.float32)


@pytest.fixture(scope="module")
def whole():
  """The output for ones, on one device."""
  return dropped(ones())[0]


def test_places_are_counted_from_the_first_layer_of_the_model():
  """A graph of one layer drops what the layer drops in the whole model."""
  fifth = dropped(ones(), place=5)
  np.testing.assert_equal(dropped(ones(), place=1, places_before=4), fifth)


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_the_rate_is_met_and_the_mean_is_kept(rate):
  x = np.ones([16, 64, 65], np.float32)
  y, _ = dropped(x, rate=rate)
  kept = np.float32(1) / np.float32(1 - rate)
  np.testing.assert_allclose(np.unique(y), [0, kept], rtol=1e-6)
  # 5 standard errors of a mean of that many draws, for all and in each half.
  for part in (y, y[:8], y[:, :32], y[..., :32], y[..., 33:]):
    margin = 5 * np.sqrt(rate * (1 - rate) / part.size)
    assert np.mean(part == 0) == pytest.approx(rate, abs=margin)


def test_neighbors_are_dropped_independently():
  kept = dropped(np.ones([16, 64, 64], np.float32), rate=0.5)[0] > 0
  for one, other in (
    (kept[1:], kept[:-1]),
    (kept[:, 1:], kept[:, :-1]),
    (kept[..., 1:], kept[..., :-1]),
    (kept[..., :32], kept[..., 32:]),
  ):
    margin = 5 / np.sqrt(4 * one.size)
    assert np.mean(one == other) == pytest.approx(0.5, abs=margin)


def test_the_gradient_has_the_mask_of_the_output():
  x = np.random.default_rng(0).normal(size=[ROWS, LENGTH, WIDTH])
  x = x.astype(np.float32)
  y, dx = dropped(x)
  scale = 1 / 0.9
  np.testing.assert_allclose(dx, 2 * scale * y, rtol=1e-5)
  np.testing.assert_array_equal(dx == 0, y == 0)


def test_a_mask_depends_on_seed_step_and_place_alone(whole):
  np.testing.assert_array_equal(dropped(ones())[0], whole)
  for change in ({"seed": 2}, {"seed": 1 + 2**32}, {"step": 1}, {"place": 2}):
    same = np.mean(dropped(ones(), **change)[0] == whole)
    assert same == pytest.approx(0.82, abs=0.05), change  # 0.9^2 + 0.1^2


def test_slices_and_microbatches_compute_their_part_of_one_mask(whole):
  split, _ = dropped(ones(), mesh=mesh_layout("batch over data"))
  np.testing.assert_array_equal(split, whole)
  mesh = mesh_layout("all over data and model")
  half, _ = dropped(ones(ROWS // 2), first_row=ROWS // 2, mesh=mesh)
  np.testing.assert_array_equal(half, whole[ROWS // 2 :])


def one_step(mesh=SINGLE, **changes):
  how = {"rows": random_documents, "mesh": mesh, "num_steps": 1}
  return train(dataclasses.replace(CONFIG, **changes), loss=DROPPING, **how)


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout", ["batch over data", "all over data and model"]
)
def test_training_drops_the_same_under_layouts_microbatches_and_remat(layout):
  variables, (metrics,) = one_step()
  _, (without,) = train(CONFIG, rows=random_documents, num_steps=1)
  assert metrics["loss"] != pytest.approx(without["loss"], rel=1e-3)
  mesh = mesh_layout(layout, num_microbatches=2)
  others, (split,) = one_step(mesh, remat="layer")
  assert split == pytest.approx(metrics, rel=1e-5)
  for name, value in variables.items():
    if name.endswith("/second_moment"):  # squares of the first gradients
      assert relative_error(others[name], value) < 1e-5, name


def test_loss_without_a_step_drops_nothing():
  batch = random_tokens(CONFIG, 2, seed=0)
  params = oracle.random_parameters(CONFIG, seed=1)
  with tf.Graph().as_default() as graph, tf.Session() as session:
    config = step_config(CONFIG, SINGLE, loss=DROPPING)
    program = build_train_program(config, batch_size=2, seed=0)
    session.run(program.initialize)
    load_parameters(session, program.slices, params)
    ((loss, _),) = TrainStep(Client(session), program).losses(batch)
    assert any("dropout" in op.name for op in graph.get_operations())
  exact, _ = oracle.loss(CONFIG, params, **batch, z_loss=0.0)
  assert loss == pytest.approx(exact, rel=1e-6)


def test_without_dropout_there_is_no_operation_for_it():
  with tf.Graph().as_default() as graph:
    build_train_program(step_config(CONFIG, SINGLE), batch_size=2, seed=0)
  assert not [op for op in graph.get_operations() if "dropout" in op.name]
