# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Microbatches and pods take the step of one batch, with the same bits."""

import collections
import dataclasses
import functools
import itertools
import math

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.communication import dcn_bytes
from palm_mtf.config import PodsConfig
from palm_mtf.programs.train_program import build_train_program
from tests.mtf_testing import (
  ONE_POD,
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_documents,
  relative_error,
  small_config,
  train,
)

CONFIG = small_config(num_layers=1)
TWO_PODS = PodsConfig(num_pods=2)
IN_BFLOAT16 = dataclasses.replace(TWO_PODS, dcn_dtype="bfloat16")
# Every gradient is clipped, so that a wrong norm would change the step.
CLIPPING = dataclasses.replace(PALM_OPTIMIZER, gradient_clip=0.1)


def documents_of_unequal_weight(config, batch_size, seed):
  """Returns documents; the first two rows and the first part weigh nothing."""
  batch = random_documents(config, batch_size, seed)
  batch["loss_weights"][: batch_size // 2] = 0
  return batch


def one_step(pods=ONE_POD, mesh=SINGLE, **changes):
  """Returns every variable and the metrics after one step.

  The second moments are then the squares of the clipped gradients.
  """
  settings = {"rows": random_documents, "optimizer": CLIPPING, **changes}
  variables, (metrics,) = train(
    CONFIG, mesh=mesh, pods=pods, num_steps=1, **settings
  )
  return variables, metrics


def assert_same_step(actual, expected, tolerance=1e-6):
  (variables, metrics), (expected_variables, expected_metrics) = (
    actual,
    expected,
  )
  assert metrics == pytest.approx(expected_metrics, rel=tolerance)
  for name, value in expected_variables.items():
    # Moments are squares of gradients.
    margin = 2 * tolerance if name.endswith("/second_moment") else tolerance
    assert relative_error(variables[name], value) < margin, name


@pytest.fixture(scope="module")
def whole():
  return one_step()


# Slow: other tests have two.
@pytest.mark.parametrize(
  "num_microbatches", [pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_gradients_and_metrics_are_those_of_one_batch(whole, num_microbatches):
  mesh = dataclasses.replace(SINGLE, num_microbatches=num_microbatches)
  assert_same_step(one_step(mesh=mesh), whole)


def test_microbatches_weigh_as_much_as_their_tokens():
  """One of them has weight 0; the mean of the means would be half the loss."""
  mesh = dataclasses.replace(SINGLE, num_microbatches=2)
  parts = one_step(mesh=mesh, rows=documents_of_unequal_weight)
  assert_same_step(parts, one_step(rows=documents_of_unequal_weight))


# Each axis, and both; slow, because layouts_test.py has both.
@pytest.mark.parametrize(
  "layout",
  [
    "batch over data",
    pytest.param("vocab over model", marks=pytest.mark.slow),
    pytest.param("all over data and model", marks=pytest.mark.slow),
  ],
)
def test_layouts_do_not_change_microbatches(whole, layout):
  mesh = mesh_layout(layout, num_microbatches=2)
  assert_same_step(one_step(mesh=mesh), whole, tolerance=2e-6)


@pytest.mark.slow  # layouts_test.py has two microbatches of both axes twice
def test_the_same_steps_twice_give_the_same_bits():
  mesh = mesh_layout("batch over data", num_microbatches=2)
  config = small_config(num_layers=1, activation_dtype="bfloat16")
  (first, first_metrics), (second, second_metrics) = (
    train(config, PALM_OPTIMIZER, mesh=mesh) for _ in range(2)
  )
  assert first_metrics == second_metrics
  for name, value in first.items():
    np.testing.assert_array_equal(second[name], value, err_msg=name)


def test_sums_are_float32_and_in_no_checkpoint():
  names = []
  for num_microbatches in (1, 2):
    with tf.Graph().as_default() as graph:
      program = build_train_program(
        small_config(num_layers=1, activation_dtype="bfloat16"),
        dataclasses.replace(SINGLE, num_microbatches=num_microbatches),
        PALM_OPTIMIZER,
        batch_size=4,
        seed=0,
      )
      kept = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
    assert {each.dtype.base_dtype for each in kept} == {tf.float32}
    names.append(list(program.slices))
  assert names[0] == names[1]


def test_all_reduces_of_gradients_come_once_per_step():
  """A microbatch adds only each slice's own part of a sum."""
  with tf.Graph().as_default():
    program = build_train_program(
      CONFIG,
      mesh_layout("batch over data", num_microbatches=2),
      PALM_OPTIMIZER,
      batch_size=4,
      seed=0,
    )
    devices = {
      name: reached_devices(program, name)
      for name in ("embedding", "layer_000/mlp/wo", "layer_000/norm/scale")
    }
  assert all(len(each) == 1 for each in devices.values()), devices


def reached_devices(program, name):
  """Returns the devices whose values device 0 adds to a sum."""
  (add,) = (
    op
    for op in program.update.graph.get_operations()
    if op.type in ("If", "StatelessIf")
    and any(f"{name}/gradient_sum/slice_0" in x.name for x in op.inputs)
  )
  seen, todo = set(), [add]
  while todo:
    for x in todo.pop().inputs:
      if x.op not in seen:
        seen.add(x.op)
        todo.append(x.op)
  return {op.device for op in seen if op.device}


def test_pods_take_the_step_of_one_with_the_whole_batch(whole):
  assert_same_step(one_step(TWO_PODS), whole)


def test_pods_weigh_as_much_as_their_tokens():
  """One of them has weight 0; the mean of the means would be half the loss."""
  assert_same_step(
    one_step(TWO_PODS, rows=documents_of_unequal_weight),
    one_step(rows=documents_of_unequal_weight),
  )


# Slow, because both axes have twice as many devices.
@pytest.mark.slow
@pytest.mark.parametrize(
  "mesh",
  [
    dataclasses.replace(SINGLE, num_microbatches=2),
    mesh_layout("batch over data"),
    pytest.param(
      mesh_layout("all over data and model"), marks=pytest.mark.slow
    ),
  ],
  ids=["microbatches", "data:2", "data:2,model:2"],
)
def test_pods_microbatches_and_layouts_combine(mesh, whole):
  assert_same_step(one_step(TWO_PODS, mesh), whole, tolerance=2e-6)


@pytest.mark.slow
def test_dropout_masks_equal_the_masks_of_the_whole_batch():
  dropping = dataclasses.replace(CLIPPING, dropout=0.3)
  mesh = dataclasses.replace(SINGLE, num_microbatches=2)
  assert_same_step(
    one_step(TWO_PODS, mesh, optimizer=dropping), one_step(optimizer=dropping)
  )


# `train` compares the pods' bits after each step. Three pods are the fewest
# that may add in different orders; other numbers are slow.
@pytest.mark.parametrize(
  ("num_pods", "dcn_dtype"),
  [
    (3, "bfloat16"),
    pytest.param(2, "float32", marks=pytest.mark.slow),
    pytest.param(4, "bfloat16", marks=pytest.mark.slow),
  ],
)
def test_pods_hold_the_same_bits_after_every_step(num_pods, dcn_dtype):
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dcn_dtype)
  config = small_config(num_layers=1, activation_dtype="bfloat16")
  train(config, PALM_OPTIMIZER, pods=pods, batch_size=12, num_steps=3)


@pytest.mark.slow
@pytest.mark.parametrize("num_pods", [2, 3, 4])
def test_pods_hold_the_same_bits_for_200_steps(num_pods):
  pods = PodsConfig(num_pods=num_pods, dcn_dtype="bfloat16")
  mesh = mesh_layout("all over data and model", num_microbatches=2)
  config = small_config(activation_dtype="bfloat16")
  train(
    config, PALM_OPTIMIZER, pods=pods, mesh=mesh, batch_size=48, num_steps=200
  )


def test_bfloat16_rounds_each_term_once(whole):
  _, metrics = one_step(IN_BFLOAT16)
  _, expected = whole
  assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
  off = metrics["grad_norm"] / expected["grad_norm"] - 1
  assert 1e-7 < abs(off) < 2**-9


def device_index(op):
  """Returns the number of the CPU device that runs `op`."""
  if not op.device:  # reads of a variable run where the variable is
    assert op.inputs[0].dtype == tf.resource, op
    return device_index(op.inputs[0].op)
  return tf.DeviceSpec.from_string(op.device).device_index


def graph_before(operations):
  """Yields each operation that `operations` depend on."""
  todo, seen = list(operations), set()
  while todo:
    op = todo.pop()
    before = {*op.control_inputs, *(x.op for x in op.inputs)} - seen
    yield from before
    todo += before
    seen |= before


@functools.lru_cache(
  maxsize=2
)  # PaLM's 2D layout, and the layout of several tests
def build(mesh, pods):
  with tf.Graph().as_default():
    return build_train_program(
      CONFIG, mesh, PALM_OPTIMIZER, batch_size=24, seed=0, pods=pods
    )


def crossings(mesh, pods):
  """Returns {(pod, other pod): bytes sent} in one step's graph."""
  program = build(mesh, pods)
  last = [program.update, *(x.op for x in program.metrics.values())]
  sent = {}
  for op in [*last, *graph_before(last)]:
    for x in op.inputs:
      if x.op in (program.step.op, program.microbatch.op):
        continue  # from the client
      start, end = device_index(x.op), device_index(op)
      route = start // mesh.num_devices, end // mesh.num_devices
      if route[0] != route[1]:
        assert start % mesh.num_devices == end % mesh.num_devices, x
        # A tensor that several operations of a device read is sent once.
        sent[x.name, end] = route, x.dtype.size * math.prod(x.shape.as_list())
  totals = collections.Counter()
  for route, num_bytes in sent.values():
    totals[route] += num_bytes
  return totals


# Each mesh, number of pods and dtype at least once.
@pytest.mark.parametrize(
  ("mesh", "num_pods", "dcn_dtype"),
  [
    (SINGLE, 3, "float32"),
    # Slow, because the next layout splits the batch too.
    pytest.param(
      mesh_layout("batch over data", num_microbatches=2),
      *(2, "bfloat16"),
      marks=pytest.mark.slow,
    ),
    (mesh_layout("PaLM's 2D"), 2, "bfloat16"),
    pytest.param(
      mesh_layout("batch over data", num_microbatches=2),
      *(3, "float32"),
      marks=pytest.mark.slow,
    ),
    pytest.param(
      mesh_layout("PaLM's 2D"), 3, "float32", marks=pytest.mark.slow
    ),
  ],
  ids=[
    "one device of three",
    "batch over data of two",
    "PaLM's 2D of two",
    "batch over data of three",
    "PaLM's 2D of three",
  ],
)
def test_only_gradients_and_three_sums_cross_from_device_to_counterpart(
  mesh, num_pods, dcn_dtype
):
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dcn_dtype)
  sent = crossings(mesh, pods)
  assert set(sent) == set(itertools.permutations(range(pods.num_pods), 2))
  assert len(set(sent.values())) == 1
  assert sum(sent.values()) == dcn_bytes(CONFIG, mesh, pods)


def test_the_client_sends_each_pod_only_its_own_rows():
  """And the numbers of the step and of the microbatch."""
  mesh = mesh_layout("batch over data", num_microbatches=2)
  program = build(mesh, IN_BFLOAT16)
  row_bytes = 2 * 4 * CONFIG.sequence_length  # inputs and targets, int32
  for number, pod in enumerate(program.pods):
    fed = list(pod.features.values())
    readers = [op for x in fed for op in (x.op, *x.consumers())]
    assert {device_index(op) // 2 for op in readers} == {number}
    fed_bytes = sum(x.dtype.size * math.prod(x.shape) for x in fed)
    assert 2 * fed_bytes == 24 // 2 * row_bytes


def test_a_pod_needs_no_other_before_the_last_microbatch():
  mesh = mesh_layout("batch over data", num_microbatches=2)
  program = build(mesh, IN_BFLOAT16)
  client = {program.step.op, program.microbatch.op}
  client |= set(graph_before(client))
  for number, pod in enumerate(program.pods):
    needed = set(graph_before([pod.stages[0].forward]))
    assert needed & {x.op for x in pod.features.values()}
    pods = {
      tf.DeviceSpec.from_string(op.device).device_index // 2
      for op in needed - client
      if op.device
    }
    assert pods == {number}
