# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is kept for the backward pass: the built graph, and the paper."""

import dataclasses
import math

import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.activations import (
  exchange_bytes,
  kept_bytes,
  loss_bytes,
  weight_copy_bytes,
  working_bytes,
)
from palm_mtf.accounting.params import count_parameters, parameter_shapes
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.parameter_names import parsed
from palm_mtf.config.pods import PodsConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.loss import cross_entropy
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from tests.accounting.published_sizes import PALM_8B, PALM_540B
from tests.mtf_testing import SINGLE, small_config

ROWS = 3
PALM_2D = MeshLayout(
  mesh_shape="data:256,model:12",
  layout="batch:data,heads:model,d_ff:model,vocab:model,"
  "d_model_stored:data,d_model_residual:model",
)


def kept_for_the_backward_pass(config):
  """Returns the bytes of activations, and names of weights as they are read."""
  with tf.Graph().as_default():
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "mesh")
    dims = model_dims(config, ROWS, SINGLE)
    weights = TrainedWeights(mesh, config, dims, seed=0)
    tokens = mtf.Shape([dims.batch, dims.length])
    inputs, targets = (mtf.zeros(mesh, tokens, tf.int32) for _ in range(2))
    logits = Palm(config, dims, weights).logits(inputs)
    token_loss, log_z = cross_entropy(logits, targets)
    loss = mtf.reduce_mean(token_loss) + mtf.reduce_mean(log_z)
    made_by = {x: op for op in graph.operations for x in op.outputs}
    num_forward = len(graph.operations)
    variables = [x.outputs[0] for x in graph.trainable_variables]
    mtf.gradients([loss], variables)
  crossing = {
    x: made_by[x]
    for op in graph.operations[num_forward:]
    for x in op.inputs
    if x in made_by
  }
  activations, weights = 0, set()
  for x, op in crossing.items():
    names = [dim.name for dim in x.shape.dims]
    size = x.dtype.size * math.prod(x.shape.to_integer_list)
    if isinstance(op, mtf.Variable):
      weights.add(op.name)
    elif "batch" in names and x.dtype.is_floating:
      # One number a token: log z, and the gradient of each token's loss.
      activations += size if len(names) > 2 else 0
  return activations, weights


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
@pytest.mark.parametrize("block", ["parallel", "serial"])
@pytest.mark.parametrize(
  ("remat", "length"),
  [("none", 8), ("none", 300), ("attention", 300), ("layer", 8)],
)
def test_the_built_graph_keeps_the_bytes_of_the_closed_form(
  remat, length, block, attention, dtype
):
  config = small_config(
    remat=remat,
    sequence_length=length,
    block=block,
    attention=attention,
    activation_dtype=dtype,
  )
  activations, weights = kept_for_the_backward_pass(config)
  width = {"float32": 4, "bfloat16": 2}[dtype]
  # Of the loss, the gradient of the logits is made behind the forward pass.
  gradient = ROWS * config.sequence_length * config.vocab_size * width
  expected = kept_bytes(config, SINGLE, ROWS)
  expected += loss_bytes(config, SINGLE, ROWS) - gradient
  assert activations == expected
  scales = {x for x in parameter_shapes(config) if parsed(x).is_scale}
  assert weights <= {"embedding", *scales}


def test_memory_is_linear_in_the_length_where_attention_is_computed_again():
  def needed(length):
    config = dataclasses.replace(
      PALM_8B, remat="attention", sequence_length=length
    )
    return kept_bytes(config, SINGLE, 1) + working_bytes(config, SINGLE, 1)

  # A block has 512 positions, whatever the length.
  assert needed(32768) == pytest.approx(4 * needed(8192), rel=0.01)


def test_palm_540b_keeps_one_fully_sharded_activation_a_layer():
  """Of 4 sequences on each of 256 devices, over 12 (PaLM 4)."""
  config = dataclasses.replace(PALM_540B, remat="layer")
  kept = kept_bytes(config, PALM_2D, 1024)
  assert kept == 118 * (4 * 2048) * (18432 // 12) * 2


def test_microbatches_divide_activations_and_leave_weights_alone():
  whole = MeshLayout(mesh_shape="", layout="")
  parts = MeshLayout(mesh_shape="", layout="", num_microbatches=4)
  for bytes_of in (kept_bytes, working_bytes):
    assert bytes_of(PALM_8B, whole, 8) == 4 * bytes_of(PALM_8B, parts, 8)
  assert weight_copy_bytes(PALM_8B, whole) == weight_copy_bytes(PALM_8B, parts)


def test_copies_of_weights_are_those_of_a_layer_and_of_the_embedding():
  c = PALM_8B
  embedding = c.vocab_size * c.d_model
  of_layer = (count_parameters(c) - embedding) // c.num_layers
  joined = c.d_model * (16 * 256 + 2 * 256 + 2 * c.d_ff)
  # Cast, and most of them joined.
  assert weight_copy_bytes(c, SINGLE) == 2 * (embedding + of_layer + joined)
  sharded = MeshLayout(
    mesh_shape="data:16", layout="batch:data,d_model_stored:data"
  )
  # A slice of each is cast, and gathered; a whole gradient is scattered.
  cast = (embedding + of_layer) // 16
  assert weight_copy_bytes(c, sharded) == 2 * (
    cast + 2 * (embedding + of_layer) + joined
  )


def test_gradients_of_other_pods_need_room_for_a_part_and_the_sum():
  two = PodsConfig(num_pods=2, dcn_dtype="bfloat16")
  assert exchange_bytes(PALM_8B, SINGLE, PodsConfig()) == 0
  numbers = count_parameters(PALM_8B) + 33 * 4096
  assert exchange_bytes(PALM_8B, SINGLE, two) == (2 + 4) * numbers
