# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps in a loop on TPUs are those of as many calls.

As in tests/mesh/tpu/lowering_test.py, the CPU runs what every device does.
"""

import dataclasses
import gc

import numpy as np
import pytest
from tensorflow.python.framework import kernels

from palm_mtf._tf import tf
from palm_mtf.ops.xla import fused
from tests.mesh.tpu.lowering_test import (
  ALL,
  BATCH_SIZE,
  TWO_D,
  build,
  mesh_of,
  run_of,
  tiny_config,
)
from tests.mtf_testing import PALM_OPTIMIZER, random_examples


def batches(config, num_steps):
  return [
    random_examples(config, BATCH_SIZE, seed=step) for step in range(num_steps)
  ]


def run_loop(run, batches, step=0):
  """Returns how many steps were done, and the metrics of all."""
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
  del called  # its graph, before that of the loop, which takes 2 GB
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


def test_xla_has_all_that_is_in_a_program():
  mesh = mesh_of(TWO_D, num_microbatches=2, steps_per_loop=3)
  optimizer = dataclasses.replace(PALM_OPTIMIZER, dropout=0.5)
  graph, _ = build(tiny_config(remat="layer"), mesh, optimizer=optimizer)
  types = types_in_programs(graph.as_graph_def())
  assert {"While", "XlaReduceScatter", "XlaOptimizationBarrier"} <= types
  with tf.Graph().as_default(), tf.Session() as session:
    session.run(negative(tf.constant(1.0)))  # XLA is loaded when it is used
  assert {x for x in types if "XLA_CPU_JIT" not in devices_of(x)} == {
    "CrossReplicaSum",  # of TPUs alone
    "TPUReplicateMetadata",
  }


@fused
def negative(x):
  return -x


def devices_of(operation):
  found = kernels.get_registered_kernels_for_op(operation)
  return {each.device_type for each in found.kernel}


def types_in_programs(definition):
  """Returns the types of operations, also of those in functions."""
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
