# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A learner takes the steps of plain training, from arrays and to arrays."""

import contextlib
import dataclasses

import numpy as np
import pytest

from palm_mtf.config import MeshLayout
from palm_mtf.learners.learner import open_learner
from tests.cases import slow
from tests.mtf_testing import SINGLE, random_tokens, small_config, train
from tests.settings import ADAMW, PALM_LOSS, step_config

XLA = MeshLayout(mesh_shape="data:4", layout="batch:data", tpu="v4-8")
XLA_SPLIT = MeshLayout(
  mesh_shape="data:2,model:2", layout="batch:data,d_ff:model", tpu="v4-8"
)
SPLIT = MeshLayout(mesh_shape="model:2", layout="d_ff:model")


@contextlib.contextmanager
def opened(config, mesh, optimizer=ADAMW):
  with open_learner(
    step_config(config, mesh, optimizer), num_rows=4, seed=3
  ) as learner:
    yield learner


@pytest.fixture(autouse=True)
def rehearsal(monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")


@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  [SINGLE, SPLIT, XLA, XLA_SPLIT],
  ids=["hosts", "split", "XLA", "XLA split"],
)
def test_a_learner_takes_the_steps_of_plain_training(mesh):
  """Parameters that leave it and come back, in two parts, change no bit."""
  config = small_config(num_layers=3)
  batches = [random_tokens(config, batch_size=4, seed=i) for i in range(4)]
  with opened(config, mesh) as learner:
    learner.begin()
    learner.train(batches[:2], 0)
    found = learner.arrays.read()
    some = {x: y for x, y in found.items() if x.startswith("layer_001")}
    assert some
    learner.arrays.set({x: np.zeros_like(y) for x, y in some.items()})
    for name, value in learner.arrays.read().items():
      if name in some:
        assert not value.any()
      else:
        np.testing.assert_array_equal(value, found[name], err_msg=name)
    learner.arrays.set(some)
    metrics = learner.train(batches[2:], 2)
    found = learner.arrays.read()
  expected, of_steps = train(
    config, ADAMW, mesh=SINGLE, num_steps=4, batch_size=4, seed=3
  )
  exact = mesh is SINGLE
  assert metrics["loss"] == pytest.approx(
    np.mean([x["loss"] for x in of_steps[2:]]), rel=1e-6
  )
  for name, value in found.items():
    if exact:
      np.testing.assert_array_equal(value, expected[name], err_msg=name)
    else:  # other sums, in float32
      np.testing.assert_allclose(value, expected[name], 2e-4, 2e-5, name)


@pytest.mark.parametrize("mesh", [SINGLE, slow(XLA)], ids=["hosts", "XLA"])
def test_the_first_update_of_slots_is_that_of_a_new_run(mesh):
  """At step k only the rate differs: lr(k) sign(g) (Kingma and Ba, 2.1)."""
  config = small_config(num_layers=1)
  optimizer = dataclasses.replace(ADAMW, learning_rate_schedule="palm")
  batch = random_tokens(config, batch_size=4, seed=0)
  updates, rates = {}, {}
  with opened(config, mesh, optimizer) as learner:
    for step in (0, 39_999):
      learner.begin()
      before = learner.arrays.read()
      rates[step] = learner.train([batch], step)["learning_rate"]
      after = learner.arrays.read()
      updates[step] = {x: after[x] - before[x] for x in before}
  assert rates == pytest.approx({0: 1e-2, 39_999: 1 / 200})
  for name, update in updates[0].items():
    np.testing.assert_allclose(
      updates[39_999][name], update / 2, 1e-3, 1e-6, err_msg=name
    )
  kernel = updates[0]["layer_000/attention/q"]
  assert np.median(np.abs(kernel)) == pytest.approx(1e-2, rel=0.1)


@pytest.mark.parametrize("mesh", [SINGLE, slow(XLA)], ids=["hosts", "XLA"])
def test_each_share_of_a_step_has_other_dropout_masks(mesh):
  """The same rows with the same masks have the same bits, as audits need."""
  config = small_config(num_layers=1)
  batch, found = random_tokens(config, batch_size=4, seed=0), []
  step = step_config(
    config, mesh, ADAMW, loss=dataclasses.replace(PALM_LOSS, dropout=0.3)
  )
  with open_learner(step, num_rows=4, seed=3) as learner:
    for share in (0, 1, 0):
      learner.begin()
      metrics = learner.train([batch], 5, share)
      found.append((metrics["loss"], learner.arrays.read()["final_norm/scale"]))
  (first, one), (second, _), (third, again) = found
  assert first == third != second
  np.testing.assert_array_equal(one, again)
