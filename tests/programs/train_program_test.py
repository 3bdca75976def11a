# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tests the whole training step: loss, gradients, clipping and Adafactor."""

import dataclasses
import gc
import re
import weakref

import numpy as np
import pytest
from tensorflow.python.framework import kernels

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.ops.xla import fused
from palm_mtf.programs.forward_program import build_forward_program
from palm_mtf.programs.train_program import build_train_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.training.step import TrainStep
from tests import oracle, oracle_jax
from tests.mesh.tpu.lowering_test import (
  ALL,
  BATCH_SIZE,
  TWO_D,
  build,
  mesh_of,
  run_of,
  tiny_config,
)
from tests.mtf_testing import (
  NUM_STEPS,
  PALM_OPTIMIZER,
  SINGLE,
  load_parameters,
  mesh_layout,
  oracle_slots,
  random_documents,
  random_examples,
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
    (
      {"beta1": 0.0, "beta2_exponent": 0.5, "weight_decay_exponent": 1.0},
      random_documents,
      1,
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


# Steps in a loop on TPUs have the bits of separate calls. As in
# tests/mesh/tpu/lowering_test.py, the CPU runs the program of every device.


def batches(config, num_steps):
  return [
    random_examples(config, BATCH_SIZE, seed=step) for step in range(num_steps)
  ]


def run_loop(run, batches, step=0):
  """Returns the number of steps done, and the metrics of all steps."""
  loop = run.program.loop
  feed = {loop.num_steps: len(batches), run.program.step: step}
  for name, tensor in loop.features.items():
    rows = np.concatenate([each[name] for each in batches])
    feed[tensor] = np.resize(rows, tensor.shape)
  return run.fetch([loop.num_done, loop.metrics], feed)


@pytest.mark.parametrize(
  ("layout", "num_microbatches", "dropout", "changes"),
  [
    pytest.param(ALL, 2, 0.0, {}, marks=pytest.mark.slow),
    pytest.param(ALL, 4, 0.0, {"num_layers": 2}, marks=pytest.mark.slow),
    pytest.param(TWO_D, 2, 0.5, {}, marks=pytest.mark.slow),
  ],
)
def test_a_loop_holds_the_bits_of_as_many_calls(
  layout, num_microbatches, dropout, changes
):
  config = tiny_config(**changes)
  mesh = mesh_of(layout, num_microbatches=num_microbatches, steps_per_loop=2)
  optimizer = dataclasses.replace(PALM_OPTIMIZER, dropout=dropout)
  called = run_of(
    config, dataclasses.replace(mesh, steps_per_loop=1), optimizer=optimizer
  )
  all_batches = batches(config, 3)
  steps = [called.step(x, step) for step, x in enumerate(all_batches)]
  expected = called.slices(0)
  del called  # frees its graph before the loop's graph, which takes 2 GB
  gc.collect()
  looped = run_of(config, mesh, optimizer=optimizer)
  num_done, metrics = run_loop(looped, all_batches[:2])
  assert num_done == 2
  for step in range(2):
    assert {n: x[step] for n, x in metrics.items()} == steps[step]
  num_done, metrics = run_loop(looped, all_batches[2:], step=2)
  assert num_done == 1  # fewer than it was built for
  assert {n: x[0] for n, x in metrics.items()} == steps[2]
  actual = looped.slices(0)
  assert actual.keys() == expected.keys()
  for name, parts in expected.items():
    np.testing.assert_equal(actual[name], parts, err_msg=name)


@pytest.mark.slow
def test_a_loop_ends_at_a_step_that_is_not_finite_which_changes_nothing():
  config = tiny_config()
  mesh = mesh_of(ALL, steps_per_loop=3)
  looped, called = run_of(config, mesh), run_of(config, mesh)
  good, bad, never = batches(config, 3)
  bad["loss_weights"] = np.full_like(bad["loss_weights"], np.inf)
  num_done, metrics = run_loop(looped, [good, bad, never])
  assert num_done == 2
  assert np.isfinite(metrics["loss"][0])
  assert not np.isfinite(metrics["loss"][1])
  called.step(good, 0)
  for name, parts in called.slices(0).items():
    np.testing.assert_equal(looped.slices(0)[name], parts, err_msg=name)


@pytest.mark.slow
def test_xla_has_all_that_is_in_a_program():
  mesh = mesh_of(TWO_D, num_microbatches=2, steps_per_loop=3)
  optimizer = dataclasses.replace(PALM_OPTIMIZER, dropout=0.5)
  graph, _ = build(tiny_config(remat="layer"), mesh, optimizer=optimizer)
  types = types_in_programs(graph.as_graph_def())
  assert {"While", "XlaReduceScatter", "XlaOptimizationBarrier"} <= types
  with tf.Graph().as_default(), tf.Session() as session:
    session.run(negative(tf.constant(1.0)))  # XLA is loaded at its first use
  assert {x for x in types if "XLA_CPU_JIT" not in devices_of(x)} == {
    "CrossReplicaSum",  # only TPUs have it
    "TPUReplicateMetadata",
  }


@fused
def negative(x):
  return -x


def devices_of(operation):
  found = kernels.get_registered_kernels_for_op(operation)
  return {each.device_type for each in found.kernel}


def types_in_programs(definition):
  """Returns the types of operations, also of operations in functions."""
  functions = {x.signature.name: x for x in definition.library.function}
  todo = [node for node in definition.node if "_tpu_replicate" in node.attr]
  types = set()
  while todo:
    node = todo.pop()
    types.add(node.op)
    for attribute in node.attr.values():
      if attribute.func.name:
        todo += functions.pop(attribute.func.name).node_def
  return types
