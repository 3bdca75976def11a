# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Microbatches and pods take the step of one batch, with the same bits."""

import collections
import dataclasses
import functools
import itertools
import math

import pytest

from palm_mtf._tf import tf
from palm_mtf.accounting.communication import dcn_bytes, edge_bytes
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.programs.train_program import build_train_program
from tests.cases import slow
from tests.mtf_testing import (
  ONE_POD,
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_documents,
  relative_error,
  small_config,
  training,
)
from tests.settings import PALM_LOSS, step_config, work

CONFIG = small_config(num_layers=1)
TWO_PODS = PodsConfig(num_pods=2)
IN_BFLOAT16 = dataclasses.replace(TWO_PODS, dcn_dtype="bfloat16")
# Three pods are the fewest that may add in different orders.
THREE_PODS = PodsConfig(num_pods=3)
MICROBATCHES = mesh_layout("batch over data", num_microbatches=2)
# Every gradient is clipped, so that a wrong norm would change the step.
CLIPPING = dataclasses.replace(PALM_OPTIMIZER, gradient_clip=0.1)
BATCH_SIZE = 12


def batches(num_steps=1):
  return [random_documents(CONFIG, BATCH_SIZE, i) for i in range(num_steps)]


def first_steps(mesh=SINGLE, pods=ONE_POD, loss=PALM_LOSS):
  """Returns every variable and the metrics after the first step, twice.

  Half of the second step's rows weigh nothing, so that a microbatch and a pod
  have no weight; a mean of means would be half the loss. The second moments are
  then the squares of the clipped gradients.
  """
  (batch,) = batches()
  halved = {x: value.copy() for x, value in batch.items()}
  halved["loss_weights"][: BATCH_SIZE // 2] = 0
  how = {"mesh": mesh, "pods": pods, "loss": loss, "batch_size": BATCH_SIZE}
  with training(CONFIG, CLIPPING, batch, **how) as run:
    return run([batch]), run([halved])


def assert_same_steps(actual, expected, tolerance=1e-6):
  for found, other in zip(actual, expected, strict=True):
    (variables, metrics), (expected_variables, expected_metrics) = found, other
    assert metrics[0] == pytest.approx(expected_metrics[0], rel=tolerance)
    for name, value in expected_variables.items():
      # Moments are squares of gradients.
      margin = 2 * tolerance if name.endswith("/second_moment") else tolerance
      assert relative_error(variables[name], value) < margin, name


@pytest.fixture(scope="module")
def whole():
  return first_steps()


@pytest.mark.parametrize(
  ("mesh", "pods", "tolerance"),
  [
    (MICROBATCHES, ONE_POD, 2e-6),
    (SINGLE, TWO_PODS, 1e-6),
    # Slow, because layouts_test.py has microbatches on pods, too.
    slow(dataclasses.replace(SINGLE, num_microbatches=2), *(TWO_PODS, 2e-6)),
  ],
)
def test_steps_are_those_of_one_batch_whatever_the_loss_weights(
  mesh, pods, tolerance, whole
):
  assert_same_steps(first_steps(mesh, pods), whole, tolerance)


@pytest.mark.slow
def test_dropout_masks_equal_the_masks_of_the_whole_batch():
  dropping = dataclasses.replace(PALM_LOSS, dropout=0.3)
  mesh = dataclasses.replace(SINGLE, num_microbatches=2)
  whole = first_steps(loss=dropping)
  assert_same_steps(first_steps(mesh, TWO_PODS, dropping), whole)


def test_pods_add_bfloat16_terms_that_are_rounded_once_to_the_same_bits(whole):
  """`training` compares the pods' bits after each step."""
  in_bfloat16 = dataclasses.replace(THREE_PODS, dcn_dtype="bfloat16")
  how, steps = {"pods": in_bfloat16, "batch_size": BATCH_SIZE}, batches(3)
  with training(CONFIG, CLIPPING, steps[0], **how) as run:
    _, (metrics, *_) = run(steps)
  (_, (expected,)), _ = whole
  assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-6)
  off = metrics["grad_norm"] / expected["grad_norm"] - 1
  assert 1e-7 < abs(off) < 2**-9


MICROBATCHES_ON_PODS = MICROBATCHES, THREE_PODS
WITHOUT_SUMS = (
  MeshLayout(
    mesh_shape="model:2",
    layout="heads:model,d_ff:model,vocab:model,d_model_residual:model",
  ),
  IN_BFLOAT16,
)


def device_index(op):
  """Returns the number of the CPU device that runs `op`."""
  if not op.device:  # reads of a variable run where the variable is
    assert op.inputs[0].dtype == tf.resource, op
    return device_index(op.inputs[0].op)
  return tf.DeviceSpec.from_string(op.device).device_index


def graph_before(operations, has_control=True):
  """Yields each operation that `operations` depend on."""
  todo, seen = list(operations), set()
  while todo:
    op = todo.pop()
    before = {x.op for x in op.inputs} - seen
    if has_control:
      before |= set(op.control_inputs) - seen
    yield from before
    todo += before
    seen |= before


@functools.lru_cache(maxsize=3)  # of the tests that are not slow
def build(mesh, pods, frozen):
  """Returns a program whose gradients are bfloat16, and its sums float32."""
  config = dataclasses.replace(CONFIG, activation_dtype="bfloat16")
  optimizer = dataclasses.replace(PALM_OPTIMIZER, parameter_scale="stacked")
  config = step_config(config, mesh, optimizer, pods=pods)
  with tf.Graph().as_default():
    return build_train_program(config, batch_size=24, seed=0, frozen=frozen)


def graph_of(mesh, pods):
  return build(mesh, pods, ()).update.operations[0].graph


def test_sums_of_microbatches_are_float32_and_in_no_checkpoint():
  program = build(*MICROBATCHES_ON_PODS, ())
  graph = graph_of(*MICROBATCHES_ON_PODS)
  kept = graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES)
  assert {each.dtype.base_dtype for each in kept} == {tf.float32}
  assert list(program.slices) == list(build(*WITHOUT_SUMS, ()).slices)


def test_all_reduces_of_gradients_come_once_per_step():
  """A microbatch adds only each slice's own part of a sum."""
  operations = graph_of(*MICROBATCHES_ON_PODS).get_operations()
  for name in ("embedding", "layer_000/mlp/wo", "layer_000/norm/scale"):
    add, *_ = (
      op
      for op in operations
      if op.type in ("If", "StatelessIf")
      and any(f"{name}/gradient_sum/slice_0" in x.name for x in op.inputs)
    )
    devices = {op.device for op in graph_before([add], has_control=False)}
    # The batch comes from the pod's first device, so only that device's own sum
    # shows that nothing comes from the other.
    assert devices - {""} == {"/device:CPU:0"}, name


SCALARS = "step", "slot_step", "first_pod", "microbatch"


def crossings(mesh, pods, frozen):
  """Returns {(pod, other pod): bytes sent} in one step's graph."""
  update = build(mesh, pods, frozen).update
  last = [*update.operations, *(x.op for x in update.outputs.values())]
  sent = {}
  for op in [*last, *graph_before(last)]:
    for x in op.inputs:
      if x.op in [update.inputs[y].op for y in SCALARS]:
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


@pytest.mark.parametrize(
  ("num_stages", "frozen", "num_sends"),
  [
    slow(2, (), 4),
    slow(3, (), 6),
    slow(2, ("embedding",), 4),
    # Nothing before stage 1 is trained, so nothing is sent back to stage 0.
    (2, ("embedding", "layers/0/*"), 3),
    slow(3, ("embedding", "layers/[01]/*"), 4),
    slow(2, ("embedding", "layers/*"), 2),  # only the last norm is trained
  ],
)
def test_stages_send_each_other_what_the_plan_says(
  num_stages, frozen, num_sends
):
  """And each call of the plan has operations."""
  config = dataclasses.replace(CONFIG, num_layers=num_stages)
  mesh = dataclasses.replace(
    MICROBATCHES, stages=num_stages, num_microbatches=4
  )
  with tf.Graph().as_default():
    program = build_train_program(
      step_config(config, mesh), batch_size=8, seed=0, frozen=frozen
    )
  calls = [x for stream in program.plan.streams for x in stream]
  sent = {}
  for call in calls:
    before = [*graph_before(program.programs[call.nodes].operations)]
    assert any("Dequeue" in x.type or "Placeholder" in x.type for x in before)
    for op in before:
      for x in op.inputs:
        start, end = (device_index(y) // mesh.num_devices for y in (x.op, op))
        if start == end or x.op.type.startswith("Placeholder"):
          continue  # on the same stage, or from the client
        sent[x.name, end] = x.dtype.size * math.prod(x.shape.as_list())
  given = work(config, mesh, 8)
  planned = [edge_bytes(x, given) for x in program.plan.edges]
  assert len(planned) == num_sends
  assert mesh.num_microbatches * sum(sent.values()) == sum(planned)


@pytest.mark.slow  # executors/xla/frozen_test.py has stages of hosts, too
def test_frozen_stages_leave_the_losses_and_gradients_of_the_others():
  """As if all parameters were trained, after one step from the same weights."""
  config = dataclasses.replace(CONFIG, num_layers=2)
  mesh = dataclasses.replace(SINGLE, stages=2, num_microbatches=2)
  optimizer = dataclasses.replace(PALM_OPTIMIZER, gradient_clip=1e9)
  (batch,), found = batches(), []
  for frozen in ((), ("embedding", "layers/0/*")):
    given = dict(mesh=mesh, batch_size=BATCH_SIZE, frozen=frozen)
    with training(config, optimizer, batch, **given) as run:
      found.append(run([batch]))
  (every, metrics), (tuned, tuned_metrics) = found
  assert tuned_metrics[0]["loss"] == metrics[0]["loss"]
  trained = [x for x in tuned if x.startswith(("layer_001", "final_norm"))]
  assert len(trained) > 6
  for name in trained:  # weights, momenta and second moments
    assert tuned[name].tobytes() == every[name].tobytes(), name


@pytest.mark.parametrize(
  ("mesh", "pods", "frozen"),
  [
    (*MICROBATCHES_ON_PODS, ()),
    (*WITHOUT_SUMS, ()),
    (*WITHOUT_SUMS, ("embedding", "layers/0/mlp/*")),
    slow(mesh_layout("PaLM's 2D"), THREE_PODS, ()),  # others have each axis
  ],
)
def test_only_gradients_and_three_sums_cross_from_device_to_counterpart(
  mesh, pods, frozen
):
  """Gradients of trained parameters only."""
  sent = crossings(mesh, pods, frozen)
  assert set(sent) == set(itertools.permutations(range(pods.num_pods), 2))
  assert len(set(sent.values())) == 1
  given = work(CONFIG, mesh, pods=pods, frozen=frozen)
  assert sum(sent.values()) == dcn_bytes(given)


def rows_of(program, pod):
  """Returns the placeholders of a pod's rows."""
  inputs = program.inputs.items()
  return [x for name, x in inputs if name.startswith(f"gradients[{pod}]/")]


def test_the_client_sends_each_pod_only_its_own_rows():
  """And the numbers of the step and of the microbatch."""
  row_bytes = 2 * 4 * CONFIG.sequence_length  # inputs and targets, int32
  update = build(*MICROBATCHES_ON_PODS, ()).update
  for number in range(3):
    fed = rows_of(update, number)
    readers = [op for x in fed for op in (x.op, *x.consumers())]
    assert {device_index(op) // 2 for op in readers} == {number}
    fed_bytes = sum(x.dtype.size * math.prod(x.shape) for x in fed)
    assert 2 * fed_bytes == 24 // 3 * row_bytes


def test_a_pod_needs_no_other_before_the_last_microbatch():
  program = build(*MICROBATCHES_ON_PODS, ())
  client = {program.update.inputs[x].op for x in ("step", "microbatch")}
  client |= set(graph_before(client))
  for number in range(3):
    gradients = program.programs[f"gradients[{number}]",]
    needed = set(graph_before(gradients.operations))
    assert needed & {x.op for x in rows_of(gradients, number)}
    devices = {op.device for op in needed - client if op.device}
    indices = [tf.DeviceSpec.from_string(x).device_index for x in devices]
    assert {x // 2 for x in indices} == {number}


def test_no_sum_of_floats_depends_on_which_term_is_ready_first():
  """TensorFlow's AddN begins with a term whose memory it may reuse."""
  for built in (MICROBATCHES_ON_PODS, WITHOUT_SUMS):
    definition = graph_of(*built).as_graph_def()
    functions = definition.library.function
    nodes = [*definition.node, *(x for f in functions for x in f.node_def)]
    sums = [x for x in nodes if x.op == "AddN" and x.attr["N"].i > 2]
    assert not [x.name for x in sums if x.attr["T"].type != tf.int64]
