# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A step of several microbatches is the step of their one batch."""

import dataclasses

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.programs.train_program import build_train_program
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_documents,
  relative_error,
  small_config,
  train,
)

CONFIG = small_config(num_layers=1)


def documents_of_unequal_weight(config, batch_size, seed):
  """Returns documents whose first two rows, and microbatch, weigh nothing."""
  batch = random_documents(config, batch_size, seed)
  batch["loss_weights"][: batch_size // 2] = 0
  return batch


def one_step(mesh, rows=random_documents):
  """Returns the clipped gradients' squares, by parameter, and the metrics.

  After one step they are the second moments.
  """
  # Every gradient is clipped: what the clip is computed from matters.
  optimizer = dataclasses.replace(PALM_OPTIMIZER, gradient_clip=0.1)
  variables, (metrics,) = train(
    CONFIG, optimizer, rows=rows, mesh=mesh, num_steps=1
  )
  name = "/second_moment"
  squares = {n: v for n, v in variables.items() if n.endswith(name)}
  assert len(squares) == len(variables) / 3
  return squares, metrics


@pytest.fixture(scope="module")
def whole():
  return one_step(SINGLE)


def assert_same_step(actual, expected, tolerance):
  (squares, metrics), (expected_squares, expected_metrics) = actual, expected
  assert metrics == pytest.approx(expected_metrics, rel=tolerance)
  for name, square in expected_squares.items():
    assert relative_error(squares[name], square) < 2 * tolerance, name


# Slow: other tests have two.
@pytest.mark.parametrize(
  "num_microbatches", [pytest.param(2, marks=pytest.mark.slow), 4]
)
def test_gradients_and_metrics_are_those_of_one_batch(whole, num_microbatches):
  mesh = dataclasses.replace(SINGLE, num_microbatches=num_microbatches)
  assert_same_step(one_step(mesh), whole, tolerance=1e-6)


def test_microbatches_weigh_as_much_as_their_tokens():
  """One of them nothing: the mean of the means would be half the loss."""
  mesh = dataclasses.replace(SINGLE, num_microbatches=2)
  parts = one_step(mesh, documents_of_unequal_weight)
  whole = one_step(SINGLE, documents_of_unequal_weight)
  assert_same_step(parts, whole, tolerance=1e-6)


# Each axis alone and both. Slow: layouts_test.py has both with microbatches.
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
  assert_same_step(one_step(mesh), whole, tolerance=2e-6)


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


def test_all_reduces_of_gradients_come_once_a_step():
  """What a microbatch adds is each slice's own part of the sum."""
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
  """Returns where the values come from that device 0 adds to a sum."""
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
