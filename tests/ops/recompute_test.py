# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""REMAT recomputes the activations that it names, and changes no bit."""

import collections

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.native.operations import threads_here
from palm_mtf.ops.recompute import recomputed
from palm_mtf.programs.train_program import build_train_program
from tests.blocks import SETTINGS
from tests.mtf_testing import (
  PALM_OPTIMIZER,
  SINGLE,
  mesh_layout,
  random_documents,
  small_config,
  train,
  without_compiler,
)
from tests.settings import step_config


def two_steps(mesh=SINGLE, **changes):
  config = small_config(**{"activation_dtype": "bfloat16", **changes})
  how = {"rows": random_documents, "mesh": mesh, "num_steps": 2}
  return train(config, PALM_OPTIMIZER, **how)


def assert_same_bits(actual, expected):
  assert actual[1] == expected[1]  # metrics
  for name, value in expected[0].items():
    np.testing.assert_array_equal(actual[0][name], value, err_msg=name)


@pytest.mark.slow
@pytest.mark.parametrize(
  "changes",
  [{}, {"block": "serial", "attention": "multi_head"}, SETTINGS["Gemma 3"]],
  ids=["PaLM", "serial", "Gemma 3"],
)
def test_recomputing_changes_no_bit(changes, monkeypatch):
  """Compares losses, the gradients' norms and moments, and parameters."""
  without_compiler(monkeypatch)  # in C++, REMAT = "attention" changes nothing
  kept = two_steps(**changes)
  for remat in ("attention", "layer"):
    assert_same_bits(two_steps(**changes, remat=remat), kept)


@pytest.mark.slow
@pytest.mark.parametrize(
  "layout", ["batch over data", "all over data and model"]
)
def test_recomputing_changes_no_bit_under_layouts_and_microbatches(layout):
  mesh = mesh_layout(layout, num_microbatches=2)
  kept = two_steps(mesh, num_layers=1)
  again = two_steps(mesh, num_layers=1, remat="layer")
  assert_same_bits(again, kept)


# With a C++ compiler, our operations replace these fused functions.
NATIVE = {
  "PalmReadProduct": "read_parts",
  "PalmReadProductGradient": "read_parts_gradient",
}


def calls_of_a_step(**changes):
  """Returns how often a training step calls each fused function."""
  config = step_config(small_config(**changes), SINGLE)
  with tf.Graph().as_default():
    program = build_train_program(config, batch_size=2, seed=0)
    calls, seen = collections.Counter(), set()
    todo = [*program.update.operations]
    while todo:
      op = todo.pop()
      if op in seen:
        continue
      seen.add(op)
      todo += [x.op for x in op.inputs] + op.control_inputs
      if op.type in ("PartitionedCall", "StatefulPartitionedCall"):
        name = op.get_attr("f").name.removeprefix("__inference_palm_mtf_")
        calls[name.rpartition("_")[0]] += 1
      calls[NATIVE.get(op.type, op.type)] += 1
  return calls


@pytest.mark.parametrize(
  "remat, attention", [("none", 2), ("attention", 4), ("layer", 4)]
)
def test_a_policy_recomputes_what_it_names_once_in_each_layer(
  remat, attention, monkeypatch
):
  without_compiler(monkeypatch)
  calls = calls_of_a_step(remat=remat)
  assert calls["masked_softmax"] == attention
  # Cheap functions are always repeated.
  assert calls["read_parts"] == 4
  # Their gradients are computed once.
  assert calls["softmax_gradient"] == calls["read_parts_gradient"] == 2


def test_a_recomputed_block_has_its_inputs_in_the_same_order_each_time():
  """In another order, JAX would not find the program that it has compiled."""
  graph = mtf.Graph()
  mesh = mtf.Mesh(graph, "mesh")
  dim = mtf.Dimension("a", 2)
  # Their addresses may be in any order.
  tensors = [mtf.zeros(mesh, mtf.Shape([dim])) for _ in range(20)]
  y = recomputed(lambda x: mtf.add_n([x, *tensors[:0:-1]]), tensors[:1])
  assert y.operation.inputs[:-1] == [tensors[0], *tensors[:0:-1]]


@pytest.mark.skipif(not threads_here(), reason="there is no C++ compiler here")
@pytest.mark.parametrize("remat, attention", [("attention", 2), ("layer", 4)])
def test_in_cpp_no_policy_keeps_attention_weights(remat, attention):
  calls = calls_of_a_step(remat=remat)
  assert calls["masked_softmax"] == calls["softmax_gradient"] == 0
  assert calls["PalmAttention"] == attention  # a layer is computed again
  assert calls["PalmAttentionGradient"] == 2
  assert calls["read_parts"] == 4
