# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the whole training step: loss, gradients, clipping and Adafactor."""

import dataclasses
import gc
import re
import weakref

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.programs.forward_program import build_forward_program
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import TrainStep
from tests import oracle, oracle_jax
from tests.mtf_testing import (
  NUM_STEPS,
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  mesh_layout,
  oracle_slots,
  random_documents,
  random_tokens,
  relative_error,
  small_config,
  train,
)

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
    ({}, random_documents, 1),
    (
      {"gradient_clip": 0.05, "update_clip": 0.5, "learning_rate": 0.5},
      random_tokens,
      1,
    ),
    # Slow, because adafactor_test.py has other exponents.
    pytest.param(
      {"beta1": 0.0, "beta2_exponent": 0.5, "weight_decay_exponent": 1.0},
      *(random_documents, 1),
      marks=pytest.mark.slow,
    ),
    ({"gradient_clip": 0.05}, random_documents, 4),
    (
      {"second_moment": "factored", "parameter_scale": "stacked"},
      random_tokens,
      1,
    ),
  ],
  ids=[
    "PaLM's settings",
    "documents and loss weights",
    "every clip at work",
    "other exponents",
    "four microbatches",
    "factored, stacked scale",
  ],
)
def test_steps_follow_the_oracle(changes, rows, num_microbatches):
  """Model, gradients, clipping, schedule, moments and decay, step by step."""
  config = small_config()
  optimizer = dataclasses.replace(PALM_OPTIMIZER, **changes)
  params = oracle.random_parameters(config, seed=7)
  mesh = dataclasses.replace(SINGLE, num_microbatches=num_microbatches)
  variables, metrics = train(
    config, optimizer, rows=rows, mesh=mesh, params=params
  )

  adafactor = oracle.Adafactor(optimizer, params)
  for step in range(NUM_STEPS):
    batch = rows(config, batch_size=4, seed=step)
    loss, z_loss, gradients = oracle_jax.loss_and_gradients(
      config, params, **batch, z_loss=optimizer.z_loss
    )
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


# A single axis is slow, because the layout with both axes covers it.
@pytest.mark.parametrize(
  "layout, rows",
  [
    pytest.param("batch over data", random_documents, marks=pytest.mark.slow),
    pytest.param("vocab over model", random_tokens, marks=pytest.mark.slow),
    ("all over data and model", random_documents),
  ],
)
def test_layouts_do_not_change_training(layout, rows):
  """From the same seed: first weights, steps and moments of every slice."""
  config = small_config()
  single, single_metrics = train(config, PALM_OPTIMIZER, rows=rows, seed=3)
  split, split_metrics = train(
    config, PALM_OPTIMIZER, rows=rows, mesh=mesh_layout(layout), seed=3
  )
  assert split.keys() == single.keys()
  for name, value in single.items():
    assert relative_error(split[name], value) < 1e-3, name
  for one, other in zip(single_metrics, split_metrics, strict=True):
    assert other == pytest.approx(one, rel=1e-5)


def test_the_same_step_twice_gives_the_same_bits():
  config = small_config(num_layers=1, activation_dtype="bfloat16")
  first, first_metrics = train(config, PALM_OPTIMIZER, seed=1)
  second, second_metrics = train(config, PALM_OPTIMIZER, seed=1)
  assert first_metrics == second_metrics
  for name, value in first.items():
    np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_no_sum_of_floats_depends_on_which_term_is_ready_first():
  """TensorFlow's AddN begins with a term whose memory it may reuse."""
  optimizer = dataclasses.replace(PALM_OPTIMIZER, parameter_scale="stacked")
  with tf.Graph().as_default() as graph:
    build_train_program(
      small_config(num_layers=1),
      mesh_layout("all over data and model"),
      optimizer,
      batch_size=6,
      seed=0,
      pods=PodsConfig(num_pods=3),
    )
    definition = graph.as_graph_def()
  nodes = [*definition.node]
  for function in definition.library.function:
    nodes += function.node_def
  assert not [
    x.name
    for x in nodes
    if x.op == "AddN" and x.attr["N"].i > 2 and x.attr["T"].type == tf.float32
  ]


def test_no_object_is_left_of_a_program_that_has_trained():
  config = small_config(num_layers=1)

  def train_and_drop():
    with tf.Graph().as_default() as graph, tf.Session() as session:
      program = build_train_program(
        config, SINGLE, PALM_OPTIMIZER, batch_size=2, seed=0
      )
      session.run(program.initialize)
      TrainStep(Client(session), program).run(
        random_tokens(config, 2, seed=0), 0
      )
    return weakref.ref(graph)

  graph = train_and_drop()
  gc.collect()
  assert graph() is None


# The paper names no fan-in of o and wo; as one matrix they have both inputs.
@pytest.mark.parametrize(
  ("output_fan_in", "o", "wo"),
  [("separate", 128, 512), ("joined", 640, 640)],
)
def test_first_weights_have_the_paper_s_deviations_and_depend_on_the_seed(
  output_fan_in, o, wo
):
  config = small_config(
    d_model=256,
    num_heads=8,
    d_kv=16,
    d_ff=512,
    output_fan_in=output_fan_in,
  )
  values = []
  for seed in (0, 1):
    with tf.Graph().as_default(), tf.Session() as session:
      program = build_train_program(
        config, SINGLE, PALM_OPTIMIZER, batch_size=1, seed=seed
      )
      session.run(program.initialize)
      values.append(
        session.run(
          {n: parts[0].variable.value() for n, parts in program.slices.items()}
        )
      )
  first, other = values
  fan_in = {"q": 256, "k": 256, "v": 256, "o": o, "wi": 256, "wo": wo}
  for name, value in first.items():
    if name.endswith(("/second_moment", "/momentum")):
      assert not value.any()
    elif name.endswith("/scale"):
      assert (value == 1).all()
    else:
      kind = name.split("/")[-1].removesuffix("_gate")
      deviation = 1.0 if name == "embedding" else fan_in[kind] ** -0.5
      # 5 standard errors of the deviation of n draws, 1 / sqrt(2 n).
      margin = 5 / np.sqrt(2 * value.size)
      assert value.std() == pytest.approx(deviation, rel=margin), name
      # Not truncated: some of thousands of draws are beyond 3 deviations.
      assert np.abs(value).max() > 3 * deviation, name
      assert np.mean(value == other[name]) < 0.01, name


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
      "'inputs', 'targets', 'segments', 'loss_weights', 'prefix'.",
    ),
    (
      ["inputs", "segments"],
      "features = inputs, segments: there is no targets; every batch has "
      "inputs and targets.",
    ),
  ],
)
def test_wrong_features_are_refused(features, message):
  with tf.Graph().as_default(), pytest.raises(UserError) as error:
    build_forward_program(
      small_config(), SINGLE, batch_size=2, features=features
    )
  assert str(error.value) == message
