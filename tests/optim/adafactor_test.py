# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adafactor, its schedule and clipping on random gradients, step by step."""

import dataclasses

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.layout import MeshLayout
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.placement import session_config
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import AdafactorUpdate
from palm_mtf.optim.clip import clip_factor, global_norm, sums_of_squares
from palm_mtf.variables import Fill, sliced_variable
from tests import oracle
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  placement,
  relative_error,
  slice_indices,
)

SHAPES = {
  "kernel": [("d_model", 6), ("d_ff", 8)],
  "table": [("vocab", 12), ("d_model", 6)],
  "scale": [("d_model", 6)],
}
MESHES = {
  "one device": SINGLE,
  "split": MeshLayout(mesh_shape="model:4", layout="d_ff:model,vocab:model"),
}


def random_arrays(seed, deviations):
  rng = np.random.default_rng(seed)
  return {
    name: deviations[name] * rng.standard_normal([size for _, size in dims])
    for name, dims in SHAPES.items()
  }


def run_steps(optimizer, params, gradients, mesh):
  """Returns parameters and moments after one step per item of `gradients`."""
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    mtf_mesh = mtf.Mesh(mtf.Graph(), "mesh")
    feeds, variables, mtf_gradients = {}, [], []
    for name, dims in SHAPES.items():
      shape = mtf.Shape([mtf.Dimension(*dim) for dim in dims])
      value = sliced_variable(mtf_mesh, name, shape, initializer=Fill(0.0))
      variables.append(value.operation)
      feeds[name] = tf.placeholder(tf.float32, shape.to_integer_list)
      mtf_gradients.append(mtf.import_tf_tensor(mtf_mesh, feeds[name], shape))
    k = tf.placeholder(tf.float32, [])
    norm = global_norm(sums_of_squares(mtf_gradients))
    scalars = [
      clip_factor(norm, optimizer.gradient_clip),
      mtf.import_tf_tensor(mtf_mesh, schedule.learning_rate(k, optimizer)),
      mtf.import_tf_tensor(
        mtf_mesh, schedule.second_moment_decay(k, optimizer)
      ),
    ]
    updates = [
      AdafactorUpdate(variable, gradient, scalars, optimizer)
      for variable, gradient in zip(variables, mtf_gradients, strict=True)
    ]
    lowered = lower(mtf_mesh, placement(mesh), {"norm": norm}, updates)
    session.run(lowered.initialize)
    load_parameters(session, lowered.slices, params)
    norms = []
    for step, arrays in enumerate(gradients):
      feed = {feeds[name]: array for name, array in arrays.items()}
      fetched = session.run(
        [lowered.tensors["norm"], lowered.operations], {**feed, k: step + 1}
      )
      norms.append(fetched[0])
    values = {}
    for name, parts in lowered.slices.items():
      shape = params[name.split("/")[0]].shape
      values[name] = np.full(shape, np.nan)
      for part in parts:
        index = slice_indices(part.spec)
        values[name][index] = session.run(part.variable.value())
  return values, norms


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"gradient_clip": 0.01, "update_clip": 0.3},
    {"beta1": 0.0, "beta2_exponent": 0.6, "weight_decay_exponent": 1.5},
  ],
  ids=["PaLM's settings", "both clips at work", "other exponents"],
)
def test_100_steps_on_random_gradients_agree_with_the_float64_oracle(
  changes, mesh
):
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **changes)
  # The table's scale is below the floor of the parameter scale.
  params = random_arrays(0, {"kernel": 0.5, "table": 1e-5, "scale": 1.0})
  gradients = [
    random_arrays(seed, {"kernel": 1.0, "table": 1e-6, "scale": 0.1})
    for seed in range(1, 101)
  ]
  for arrays in gradients:
    arrays["table"][3] = 0.0  # a token that is never seen
  values, norms = run_steps(optimizer, params, gradients, MESHES[mesh])
  adafactor = oracle.Adafactor(optimizer, params)
  for arrays, norm in zip(gradients, norms, strict=True):
    params = adafactor.step(params, arrays)
    assert norm == pytest.approx(adafactor.gradient_norm, rel=1e-6)
  for name, param in params.items():
    assert relative_error(values[name], param) < 2e-6, name
    momentum = adafactor.momenta[name]
    assert relative_error(values[f"{name}/momentum"], momentum) < 1e-5, name
    second_moment = adafactor.second_moments[name]
    assert (
      relative_error(values[f"{name}/second_moment"], second_moment) < 1e-5
    ), name


@pytest.mark.parametrize("k", [1, 100, 9_999, 10_000, 10_001, 255_000])
def test_schedule_is_the_paper_s(k):
  """lr = 1e-2 for 10,000 steps, then 1/sqrt(k); beta2 = 1 - k^-0.8."""
  with tf.Graph().as_default(), tf.Session() as session:
    step = tf.constant(k, tf.float32)
    learning_rate, decay = session.run(
      [
        schedule.learning_rate(step, PALM_OPTIMIZER),
        schedule.second_moment_decay(step, PALM_OPTIMIZER),
      ]
    )
  expected = 1e-2 if k <= 10_000 else k**-0.5
  assert learning_rate == pytest.approx(expected, rel=1e-6)
  assert decay == pytest.approx(k**-0.8, rel=1e-5)
