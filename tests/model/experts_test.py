# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Experts compute what a dense MLP, JAX's ragged product and the papers say.

architecture/block_test.py compares whole models with experts with the float64
oracle.
"""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import LossConfig, PodsConfig
from palm_mtf.model.experts import (
  find_rows,
  kernel_gradients,
  multiply,
  take_rows,
)
from palm_mtf.ops.xla import xla_computation
from tests import oracle
from tests.blocks import block_config
from tests.cases import slow
from tests.mtf_testing import (
  BATCH_SIZE,
  MOVED,
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_tokens,
  relative_error,
  run_model,
  small_config,
  train,
  training,
)

FIRST, COUNT = 2, 4  # this device has experts 2 to 5
# The experts that each token chooses, two per token. -1: the expert is full.
CHOICE = np.int32([[2, 3], [5, 0], [-1, 2], [7, 6], [2, -1], [5, 2], [3, 1]])


@pytest.mark.parametrize(
  "place",
  [contextlib.nullcontext, xla_computation],
  ids=["sorted rows", "blocks"],
)
def test_products_of_rows_are_those_of_jax_ragged_dot(place):
  rng = np.random.default_rng(0)
  x = rng.standard_normal([len(CHOICE), 3]).astype(np.float32)
  kernels = rng.standard_normal([COUNT, 3, 5]).astype(np.float32)
  with tf.Graph().as_default(), tf.Session() as session, place():
    rows = find_rows(tf.constant(CHOICE), tf.constant(FIRST), COUNT)
    taken = take_rows(tf.constant(x), rows)
    y = multiply(taken, tf.constant(kernels), rows.groups)
    back = multiply(y, tf.constant(kernels), rows.groups, transpose=True)
    gradients = kernel_gradients(taken, y, rows.groups)
    found = session.run([rows.place, y, back, gradients])
  places, y, back, gradients = found
  here = (CHOICE >= FIRST) & (CHOICE < FIRST + COUNT)
  np.testing.assert_array_equal(places >= 0, here)
  assert len(np.unique(places[here])) == here.sum()
  # jax.lax.ragged_dot takes rows that are sorted by expert.
  token, rank = np.nonzero(here)
  order = np.argsort(CHOICE[token, rank], kind="stable")
  token, rank = token[order], rank[order]
  sizes = np.bincount(CHOICE[here] - FIRST, minlength=COUNT)
  given = x[token], kernels, sizes
  expected = jax.lax.ragged_dot(*given)
  np.testing.assert_allclose(y[places[token, rank]], expected, rtol=1e-5)
  expected = jax.lax.ragged_dot(expected, kernels.transpose(0, 2, 1), sizes)
  np.testing.assert_allclose(back[places[token, rank]], expected, rtol=1e-5)
  _, pull = jax.vjp(lambda k: jax.lax.ragged_dot(x[token], k, sizes), kernels)
  (expected,) = pull(jax.lax.ragged_dot(*given))
  np.testing.assert_allclose(gradients, expected, rtol=1e-5, atol=1e-6)


def dense_and_sparse(**changes):
  """Returns logits of a dense model, and of a mixture of copies of its MLPs."""
  dense = small_config(block="serial")
  sparse = dataclasses.replace(dense, mlp="experts", **changes)
  params = oracle.random_parameters(dense, seed=1)
  routers = oracle.random_parameters(sparse, seed=2)
  copies = {}
  for name, value in routers.items():
    dense_name = name.replace("mlp/experts/", "mlp/")
    own = params.get(dense_name, value)  # a dense model has no router
    copies[name] = np.broadcast_to(own, value.shape)
  batch = random_tokens(dense, batch_size=2, seed=3)
  return [
    run_model(config, own, batch, backward=False).logits
    for config, own in ((dense, params), (sparse, copies))
  ]


@pytest.mark.parametrize(
  "changes",
  [
    {"num_experts": 1, "experts_per_token": 1, "router_normalizes": False},
    {"num_experts": 4, "experts_per_token": 2},
    {"num_experts": 4, "experts_per_token": 4, "router_normalizes": False},
  ],
  ids=str,
)
def test_one_expert_or_equal_experts_are_the_dense_model(changes):
  """The gates of a token add up to 1 in all these cases."""
  dense, sparse = dense_and_sparse(**changes)
  assert relative_error(sparse, dense) < 1e-6


DEEPSEEK = block_config("DeepSeek-V3")
ONE_LAYER = block_config(
  "DeepSeek-V3", num_layers=1, layers="", variants=None, mlp="experts"
)
MIXTRAL = block_config("Mixtral")
BALANCED = LossConfig(z_loss=1e-4, balance_loss=0.01, router_z_loss=1e-3)
BIASED = LossConfig(z_loss=1e-4, balance_bias_rate=0.125)
BOTH = dataclasses.replace(BALANCED, balance_bias_rate=0.125)


def counts_of(config, params, batch):
  """Returns the oracle's {state of a router: number of choices per expert}."""
  states = {}
  oracle.forward(config, params, batch["inputs"], states=states)
  return states


@pytest.mark.parametrize(
  ("config", "loss"),
  [(ONE_LAYER, BOTH), slow(MIXTRAL, BALANCED), slow(DEEPSEEK, BIASED)],
)
def test_a_step_moves_states_by_the_choices_of_the_whole_batch(config, loss):
  """States move once per step, not per microbatch, pod or recomputed layer."""
  params = oracle.random_parameters(config, seed=1)
  batch = random_tokens(config, batch_size=8, seed=0)
  expected, loads = {}, []
  for name, counts in counts_of(config, params, batch).items():
    loads.append(config.num_experts * counts.max() / counts.sum())
    if name.endswith("load"):
      expected[name] = counts / counts.sum()
    else:  # DeepSeek-V3, 2.1.2: down by the rate if an expert is overloaded
      step = 0.125 * np.sign(counts.mean() - counts)
      expected[name] = params[name] + step
  mesh = dataclasses.replace(SINGLE, num_microbatches=2)
  pods = PodsConfig(num_pods=2, dcn_dtype="bfloat16")
  how = {"num_steps": 1, "batch_size": 8, "mesh": mesh, "pods": pods}
  config = dataclasses.replace(config, remat="layer")
  found, (metrics,) = train(config, params=params, loss=loss, **how)
  assert expected and max(loads) > 1.1
  assert metrics["expert_load"] == pytest.approx(max(loads), rel=1e-6)
  for name, value in expected.items():
    np.testing.assert_allclose(found[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize(
  ("config", "changes"),
  [
    (dataclasses.replace(MIXTRAL, num_layers=1), {"remat": "layer"}),
    slow(MIXTRAL, {"remat": "layer"}),
    slow(DEEPSEEK, {"remat": "layer"}),
    slow(DEEPSEEK, {"remat": "attention"}),
  ],
)
def test_recomputed_layers_have_the_bits_of_kept_ones(config, changes):
  """A repeated run has the same bits, too, because sums have a fixed order."""
  loss = BIASED if config.router_bias else BALANCED
  batches = [random_tokens(config, BATCH_SIZE, seed) for seed in range(2)]
  runs = []
  for own, times in (({}, 2), (changes, 1)):
    changed = dataclasses.replace(config, **own)
    with training(changed, PALM_OPTIMIZER, batches[0], loss=loss) as run:
      runs += [run(batches) for _ in range(times)]
  for other, metrics in runs[1:]:
    assert metrics == runs[0][1]
    for name, value in runs[0][0].items():
      np.testing.assert_array_equal(other[name], value, err_msg=name)


@pytest.mark.parametrize(
  ("config", "mesh", "pods"),
  [
    (ONE_LAYER, mesh_layout("batch over data"), 1),
    slow(DEEPSEEK, mesh_layout("PaLM's 2D"), 1),
    slow(DEEPSEEK, mesh_layout("all over data and model"), 2),
    slow(DEEPSEEK, dataclasses.replace(MOVED, num_microbatches=2), 2),
    slow(DEEPSEEK, dataclasses.replace(MOVED, stages=3, num_microbatches=2), 1),
    slow(
      DEEPSEEK, dataclasses.replace(SINGLE, stages=3, num_microbatches=2), 2
    ),
  ],
)
def test_layouts_pods_and_stages_take_the_steps_of_one_device(
  config, mesh, pods
):
  settings = dict(num_steps=3, batch_size=8, loss=BIASED)
  whole, metrics = train(config, **settings)
  pods = PodsConfig(num_pods=pods)
  found, others = train(config, mesh=mesh, pods=pods, **settings)
  for ours, theirs in zip(metrics, others, strict=True):
    for name in ("loss", "grad_norm", "expert_load"):
      assert theirs[name] == pytest.approx(ours[name], rel=1e-5)
  for name, value in whole.items():
    if "router_" in name:  # equal only if all steps make the same choices
      np.testing.assert_array_equal(found[name], value, err_msg=name)
