# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the whole training step: loss, gradients, clipping and Adafactor."""

import dataclasses
import gc
import re
import weakref

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import PodsConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.forward_program import build_forward_program
from tests import optimizer_oracles, oracle, oracle_jax, runs
from tests.cases import slow
from tests.mtf_testing import (
  NUM_STEPS,
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  lower,
  mesh_layout,
  oracle_slots,
  placement,
  random_documents,
  random_tokens,
  read_variables,
  relative_error,
  small_config,
  train,
  training,
)
from tests.refusals import message_of
from tests.settings import ADAMW, MUON, PALM_LOSS

NAMES_BY_KIND = {
  "embedding": "^embedding$",
  "norm": "/scale$",
  "attention": "/[qkvo]$",
  "mlp": "/w[io]",
}


@pytest.mark.parametrize(
  "changes, rows, num_microbatches",
  [
    ({}, random_tokens, 1),
    (
      {"gradient_clip": 0.05, "update_clip": 0.5, "learning_rate": 0.5},
      random_documents,
      4,
    ),
  ],
  ids=[
    "PaLM's settings",
    "documents and loss weights in four microbatches, every clip at work",
  ],
)
def test_steps_follow_the_oracle(changes, rows, num_microbatches):
  """Model, gradients, clipping, schedule, moments and decay, step by step."""
  config = small_config()
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **changes)
  params = oracle.random_parameters(config, seed=7)
  mesh = dataclasses.replace(SINGLE, num_microbatches=num_microbatches)
  how = {"rows": rows, "mesh": mesh, "params": params}
  variables, metrics = train(config, optimizer, **how)
  adafactor = oracle.Adafactor(optimizer, params)
  for step in range(NUM_STEPS):
    batch = rows(config, batch_size=4, seed=step)
    given = {**batch, "z_loss": PALM_LOSS.z_loss}
    loss, *more = oracle_jax.loss_and_gradients(config, params, **given)
    z_loss, gradients = more
    before, params = params, adafactor.step(params, gradients)
    seen = metrics[step]
    # Each step's g / sqrt(v) amplifies float32 rounding.
    assert seen["loss"] == pytest.approx(loss, rel=1e-5)
    assert seen["z_loss"] == pytest.approx(z_loss, rel=1e-5)
    assert seen["grad_norm"] == pytest.approx(adafactor.gradient_norm, rel=1e-4)
    assert seen["learning_rate"] == pytest.approx(adafactor.learning_rate)
    # The scale of a norm is measured from 1 (NORM_SCALE).
    before = {n: v - n.endswith("/scale") for n, v in before.items()}
    for kind, names in NAMES_BY_KIND.items():
      for of, values in (("parameter", before), ("update", adafactor.updates)):
        whole = [v.ravel() for n, v in values.items() if re.search(names, n)]
        rms = np.sqrt(np.mean(np.concatenate(whole) ** 2))
        assert seen[f"{of}_rms/{kind}"] == pytest.approx(rms, rel=1e-3)
  expected = {**params, **oracle_slots(adafactor)}
  assert variables.keys() == expected.keys()
  for name, value in expected.items():
    actual = variables[name].reshape(value.shape)
    assert relative_error(actual, value) < 1e-3, name


@pytest.mark.parametrize(
  ("optimizer", "exact", "layout"),
  [
    (MUON, optimizer_oracles.Muon, "d_ff over model"),
    slow(MUON, optimizer_oracles.Muon, "PaLM's 2D"),
    slow(ADAMW, optimizer_oracles.Adamw, "PaLM's 2D"),
  ],
)
def test_steps_of_two_pods_follow_the_oracle_of_another_optimizer(
  optimizer, exact, layout
):
  """On split kernels and in microbatches."""
  config = small_config(num_layers=1)
  params = oracle.random_parameters(config, seed=7)
  variables, metrics = train(
    config,
    optimizer,
    mesh=mesh_layout(layout, num_microbatches=2),
    pods=PodsConfig(num_pods=2, dcn_dtype="float32"),
    params=params,
    batch_size=8,
  )
  exact = exact(optimizer, params)
  for step in range(NUM_STEPS):
    batch = random_tokens(config, batch_size=8, seed=step)
    *_, gradients = oracle_jax.loss_and_gradients(
      config, params, **batch, z_loss=PALM_LOSS.z_loss
    )
    params = exact.step(params, gradients)
    updates = [u.ravel() for n, u in exact.updates.items() if "/w" in n]
    rms = np.sqrt(np.mean(np.concatenate(updates) ** 2))
    assert metrics[step]["update_rms/mlp"] == pytest.approx(rms, rel=1e-3)
  expected = params | exact.slots
  assert variables.keys() == expected.keys()
  for name, value in expected.items():
    assert relative_error(variables[name], value) < 1e-3, name


def train_from_seed(mesh):
  """Returns all slices, which show the first weights too, and the metrics."""
  config = small_config(num_layers=1)
  return train(config, PALM_OPTIMIZER, rows=random_documents, mesh=mesh, seed=3)


def test_layouts_do_not_change_training():
  """layouts_test.py has other layouts."""
  expected, expected_metrics = train_from_seed(SINGLE)
  split, split_metrics = train_from_seed(mesh_layout("all over data and model"))
  assert split.keys() == expected.keys()
  for name, value in expected.items():
    assert relative_error(split[name], value) < 1e-3, name
  for one, other in zip(expected_metrics, split_metrics, strict=True):
    assert other == pytest.approx(one, rel=1e-5)


def test_the_same_step_twice_gives_the_same_bits():
  """And no object is left of the program."""
  config = small_config(num_layers=1, activation_dtype="bfloat16")
  batches = [random_tokens(config, 4, seed) for seed in range(NUM_STEPS)]

  def train_twice():
    with training(config, PALM_OPTIMIZER, batches[0], seed=1) as run:
      (first, metrics), (second, second_metrics) = run(batches), run(batches)
      assert metrics == second_metrics
      runs.assert_same(first, second)
      return weakref.ref(tf.get_default_graph())

  graph = train_twice()
  gc.collect()
  assert graph() is None


def test_first_weights_have_the_paper_s_deviations_and_depend_on_the_seed():
  # The paper names no fan-in of o and wo; as one matrix they have both inputs.
  fan_in = {"q": 256, "k": 256, "v": 256, "o": 128, "wi": 256, "wo": 512}
  kept = []
  for seed, joined in enumerate(({}, {"o": 640, "wo": 640})):
    sizes = {"d_model": 256, "num_heads": 8, "d_kv": 16, "d_ff": 512}
    sizes["output_fan_in"] = "joined" if joined else "separate"
    config = small_config(num_layers=1, **sizes)
    with tf.Graph().as_default(), tf.Session() as session:
      mesh, dims = mtf.Mesh(mtf.Graph(), "mesh"), model_dims(config, 1, SINGLE)
      weights = TrainedWeights(mesh, config, dims, seed=seed)
      ids = mtf.zeros(mesh, [dims.batch, dims.length], tf.int32)
      Palm(config, dims, weights).logits(ids)
      lowered = lower({mesh: placement(SINGLE)}, {})
      session.run(lowered.initialize)
      kept.append(read_variables(session, lowered.slices[0]))
    for name, value in kept[-1].items():
      if name.endswith("/scale"):
        assert (value == 1).all()
      else:
        kind = name.split("/")[-1].removesuffix("_gate")
        inputs = {**fan_in, **joined, "embedding": 1}[kind]
        # 5 standard errors of the deviation of n draws, 1 / sqrt(2 n).
        margin = 5 / np.sqrt(2 * value.size)
        assert value.std() == pytest.approx(inputs**-0.5, rel=margin), name
        # Not truncated: some of thousands of draws are beyond 3 deviations.
        assert np.abs(value).max() > 3 * inputs**-0.5, name
        assert np.mean(value == kept[0][name]) < 0.01 or not seed, name


@pytest.mark.parametrize("rows", [random_tokens, random_documents])
def test_forward_program_agrees_with_the_oracle(rows):
  config = small_config()
  params = oracle.random_parameters(config, seed=9)
  batch = rows(config, batch_size=2, seed=9)
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_forward_program(
      config, SINGLE, batch_size=2, features=list(batch)
    )
    load_parameters(session, program.slices, params)
    logits, loss, weight_sum = session.run(
      [program.logits, program.loss, program.weight_sum],
      {program.features[name]: value for name, value in batch.items()},
    )
  exact = oracle.forward(config, params, batch["inputs"], batch.get("segments"))
  assert relative_error(logits, exact) < 1e-5
  exact, _ = oracle.loss(config, params, **batch, z_loss=0.0)
  assert loss == pytest.approx(exact, rel=1e-5)
  assert weight_sum == batch.get("loss_weights", np.ones([2, 9])).sum()


@pytest.mark.parametrize(
  "features, message",
  [
    (
      ["inputs", "targets", "segment"],
      "feature = 'segment' (did you mean \"segments\"?): choose one of "
      "'inputs', 'targets', 'segments', 'loss_weights', 'prefix', "
      "'neighbours', 'reference', 'teacher_ids', 'teacher_log_p'.",
    ),
    (
      ["inputs", "segments"],
      "features = inputs, segments: there is no targets; every batch has "
      "inputs and targets.",
    ),
  ],
)
def test_wrong_features_are_refused(features, message):
  with tf.Graph().as_default():
    given = {"batch_size": 2, "features": features}
    found = message_of(build_forward_program, small_config(), SINGLE, **given)
  assert found == message
