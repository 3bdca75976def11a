# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a device keeps: the built program, the closed form, the paper."""

import collections
import dataclasses
import math

import jax
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.memory import (
  Activations,
  DeviceBytes,
  cache_bytes_per_token,
  decode_weight_bytes,
  device_bytes,
  exchange_bytes,
  step_threads,
  update_traffic,
  weight_copy_bytes,
  weight_traffic,
)
from palm_mtf.accounting.plan import tensor_bytes
from palm_mtf.architecture.parameters import (
  count_parameters,
  parameter_shapes,
  parse_name,
)
from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.loss import cross_entropy
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.train_program import build_train_program
from tests.accounting.published_sizes import (
  PALM_8B,
  PALM_62B,
  PALM_540B,
  count_norm_scales,
)
from tests.blocks import SETTINGS, block_config
from tests.cases import slow
from tests.executors.xla.program_run import pod_step
from tests.mtf_testing import LAYOUTS, MOVED, SINGLE, mesh_layout, small_config
from tests.settings import step_config, work

QUICK = "padded vocab over three"
PALM_2D = MeshLayout(
  mesh_shape="data:256,model:12",
  layout="batch:data,heads:model,d_ff:model,vocab:model,"
  "d_model_stored:data,d_model_residual:model",
)
GEMMA_3 = block_config("Gemma 3")


# FROZEN of a model with three layers
FROZEN = ("embedding", "layers/1/*", "layers/*/mlp/w*")


@pytest.mark.parametrize(
  ("config", "layout", "frozen"),
  [
    *(
      slow(small_config(num_layers=1), name, (), unless=name == QUICK)
      for name in LAYOUTS
    ),
    (small_config(num_layers=3), "PaLM's 2D", FROZEN),
    slow(block_config("Cohere 2"), "PaLM's 2D", FROZEN),
    slow(GEMMA_3, "PaLM's 2D", ()),
    slow(GEMMA_3, "PaLM's 2D", FROZEN),
  ],
)
def test_the_built_program_keeps_the_bytes_of_the_closed_form(
  config, layout, frozen
):
  mesh = mesh_layout(layout, num_microbatches=2)
  expected = device_bytes(work(config, mesh, frozen=frozen))
  assert bool(expected.frozen_weights) == bool(frozen)
  kept = built_bytes(config, mesh, frozen)
  assert len(kept) == mesh.num_devices
  for device, found in kept.items():
    assert found["weights"] == expected.weights + expected.frozen_weights
    assert found["slots"] == expected.slots, device
    assert found["gradients"] == expected.gradients, device


@pytest.mark.parametrize(
  "frozen", [slow(()), ("embedding", "layers/[01]/*", "layers/2/mlp/*")]
)
def test_a_stage_keeps_its_own_bytes(frozen):
  """With frozen lower layers, the second stage needs more than the first."""
  config = small_config(num_layers=4, vocab_size=8)
  mesh = MeshLayout(mesh_shape="", layout="", stages=2, num_microbatches=2)
  kept = built_bytes(config, mesh, frozen)
  assert len(kept) == 2
  largest = []
  for stage, found in enumerate(kept.values()):
    whole = work(config, mesh, 8, frozen=frozen)
    parts = tensor_bytes(whole.in_stage(stage))
    weights = parts["weights"] + parts.get("frozen weights", 0)
    assert found["weights"] == weights
    assert found["slots"] == parts["slots"]
    assert found["gradients"] == parts["gradients"]
    largest.append(parts["slots"])
  assert (largest[0] < largest[1]) == bool(frozen)


def built_bytes(config, mesh, frozen):
  """Returns {device: Counter of bytes} of the variables of a built program."""
  with tf.Graph().as_default() as graph:
    build_train_program(
      step_config(config, mesh), batch_size=8, seed=0, frozen=frozen
    )
    kept = collections.defaultdict(collections.Counter)
    for each in graph.get_collection(tf.GraphKeys.GLOBAL_VARIABLES):
      name = each.op.name
      kind = "weights"
      if "/second_moment/" in name or "/momentum/" in name:
        kind = "slots"
      elif "_sum/" in name:
        kind = "gradients" if "/gradient_sum/" in name else "losses"
      size = each.dtype.size * math.prod(each.shape.as_list())
      kept[each.device][kind] += size
  return kept


@pytest.mark.parametrize(
  ("name", "mesh"),
  [
    *((x, mesh_layout("PaLM's 2D")) for x in ("Gemma 3", "Cohere 2", "LLaMA")),
    ("Mixtral", MOVED),  # `data` splits kernels of experts only once
  ],
)
def test_arrays_of_accelerators_keep_the_bytes_of_the_closed_form(name, mesh):
  config = block_config(name)
  made = pod_step(config, mesh)
  devices = made.model.placement.make_mesh(jax.devices()[: mesh.num_devices])
  kept = collections.Counter()
  for name, x in made.abstract_state(devices).items():
    kind = "weights" if name in made.parameters else "slots"
    size = math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
    kept[kind] += size
  expected = device_bytes(work(config, mesh))
  assert kept == {"weights": expected.weights, "slots": expected.slots}


@pytest.mark.parametrize("num_devices", [2, 4, 8])
def test_fully_sharded_over_n_devices_each_keeps_an_nth(num_devices):
  config = small_config()
  whole, split = (
    device_bytes(work(config, dataclasses.replace(x, num_microbatches=2)))
    for rules in ("batch:data", "batch:data,d_model_stored:data")
    for x in (MeshLayout(mesh_shape=f"data:{num_devices}", layout=rules),)
  )
  numbers = count_parameters(config) + count_norm_scales(config)
  assert (whole.weights, whole.slots) == (4 * numbers, 8 * numbers)
  assert whole.gradients == 4 * numbers
  assert split.weights * num_devices == whole.weights
  assert split.slots * num_devices == whole.slots
  assert split.gradients * num_devices == whole.gradients


def test_palm_540b_over_256_by_12_keeps_what_its_3072_chips_had():
  """175.9M parameters per chip, and copies of k, v and the norm scales.

  The 12 chips of `model` hold equal copies.
  """
  numbers = sum(x.size * n for _, x, n in work(PALM_540B, PALM_2D).slices)
  c = PALM_540B
  alike = 2 * c.num_layers * c.d_model * c.d_kv
  alike += (c.num_layers + 1) * c.d_model
  padding = 8 * c.d_model  # 256,008 rows
  parts = count_parameters(c) + count_norm_scales(c) - alike + padding
  assert numbers * 3072 == parts + 12 * alike
  assert numbers == pytest.approx(175.9e6 * 1.023, rel=1e-3)


ROWS = 3


def check_kept(config):
  """Checks the bytes of activations; returns the names of weights as read."""
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
      # One number per token: log z, and the gradient of each token's loss.
      activations += size if len(names) > 2 else 0
  # The gradient of the logits is made after the forward pass.
  gradient = ROWS * config.sequence_length * config.vocab_size
  gradient *= tf.as_dtype(config.activation_dtype).size
  expected = Activations(work(config, SINGLE, ROWS))
  of_loss = expected.loss_bytes() - gradient
  assert activations == expected.kept_bytes() + of_loss
  return weights


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
  scales = {x for x in parameter_shapes(config) if parse_name(x).is_scale}
  assert check_kept(config) <= {"embedding", *scales}


@pytest.mark.parametrize("remat", ["none", "attention", "layer"])
@pytest.mark.parametrize("name", SETTINGS)
def test_other_blocks_keep_the_bytes_of_the_closed_form(name, remat):
  config = block_config(name, remat=remat, sequence_length=300)
  assert not {x for x in check_kept(config) if parse_name(x).is_kernel}


def test_memory_is_linear_in_the_length_where_attention_is_computed_again():
  def needed(length):
    settings = {"remat": "attention", "sequence_length": length}
    config = dataclasses.replace(PALM_8B, **settings)
    activations = Activations(work(config, SINGLE, 1))
    return activations.kept_bytes() + activations.working_bytes()

  # A block has 512 positions, whatever the length.
  assert needed(32768) == pytest.approx(4 * needed(8192), rel=0.01)


def test_palm_540b_keeps_one_fully_sharded_activation_a_layer():
  """4 sequences on each of 256 devices of `data`, split over 12 (PaLM 4)."""
  config = dataclasses.replace(PALM_540B, remat="layer")
  kept = Activations(work(config, PALM_2D, 1024)).kept_bytes()
  assert kept == 118 * (4 * 2048) * (18432 // 12) * 2


def test_microbatches_divide_activations_and_leave_weights_alone():
  parts = dataclasses.replace(SINGLE, num_microbatches=4)
  one, of_part = (Activations(work(PALM_8B, x, 8)) for x in (SINGLE, parts))
  assert one.kept_bytes() == 4 * of_part.kept_bytes()
  assert one.working_bytes() == 4 * of_part.working_bytes()
  one, of_part = (weight_copy_bytes(work(PALM_8B, x)) for x in (SINGLE, parts))
  assert one == of_part


def test_copies_of_weights_are_those_of_a_layer_and_of_the_embedding():
  c = PALM_8B
  embedding = c.vocab_size * c.d_model
  of_layer = (count_parameters(c) - embedding) // c.num_layers
  joined = c.d_model * (16 * 256 + 2 * 256 + 2 * c.d_ff)
  # Weights are cast, and most of them joined.
  assert weight_copy_bytes(work(c, SINGLE)) == 2 * (
    embedding + of_layer + joined
  )
  sharded = MeshLayout(
    mesh_shape="data:16", layout="batch:data,d_model_stored:data"
  )
  # A slice of each weight is cast and gathered; a whole gradient is scattered.
  cast = (embedding + of_layer) // 16
  assert weight_copy_bytes(work(c, sharded)) == 2 * (
    cast + 2 * (embedding + of_layer) + joined
  )


def test_copies_of_weights_are_those_of_one_of_unlike_layers():
  unlike = dataclasses.replace(GEMMA_3, num_layers=2)
  like = dataclasses.replace(unlike, layers="", variants=None)
  one, other = (weight_copy_bytes(work(x, SINGLE)) for x in (unlike, like))
  assert one == other


def test_gradients_of_other_pods_need_room_for_a_part_and_the_sum():
  two = PodsConfig(num_pods=2, dcn_dtype="bfloat16")
  assert exchange_bytes(work(PALM_8B)) == 0
  numbers = count_parameters(PALM_8B) + 33 * 4096
  assert exchange_bytes(work(PALM_8B, pods=two)) == (2 + 4) * numbers


C = dataclasses.replace(
  PALM_8B, num_layers=1, d_model=100, num_heads=2, d_kv=10, d_ff=400
)
C = dataclasses.replace(C, vocab_size=1000, sequence_length=50)
Q, KV, SCORES, COLUMNS = 20, 20, 100, 20 + 20 + 800


def test_a_parallel_block_passes_over_its_norm_product_and_softmax():
  blocks = 2 * 100 + 3 * 100 + COLUMNS + (Q + KV + 400)
  attention = 2 * SCORES
  # Numbers of the norm, and of the parts that are read from the product.
  again = 2 * 100 + COLUMNS + (Q + KV + 400)
  back = 6 * 100 + 2 * COLUMNS + (Q + KV + 400)
  softmax_gradient = 3 * SCORES + 2 * Q
  assert Activations(work(C, SINGLE, 1)).block_passes() == {
    "blocks": blocks + again + back,
    "attention": attention + softmax_gradient,
  }
  layer = dataclasses.replace(C, remat="layer")
  assert Activations(work(layer, SINGLE, 1)).block_passes() == {
    "blocks": 2 * blocks + back,
    "attention": 2 * attention + softmax_gradient,
  }
  softmax = dataclasses.replace(C, remat="attention")
  assert Activations(work(softmax, SINGLE, 1)).block_passes() == {
    "blocks": blocks + again + back,
    "attention": 2 * attention + softmax_gradient,
  }


def test_the_loss_passes_twice_over_logits_and_writes_their_gradient():
  tokens = 8 * 50
  float32 = Activations(work(C, SINGLE, 8)).traffic()["loss"]
  assert float32 == tokens * 1000 * (2 * 4 + 2)
  rounded = dataclasses.replace(C, logits_dtype="activation")
  loss = Activations(work(rounded, SINGLE, 8)).traffic()["loss"]
  assert loss == tokens * 1000 * 3 * 2


def test_each_microbatch_casts_kernels_twice_and_adds_its_gradients():
  kernels = count_parameters(C) - C.vocab_size * C.d_model
  others = C.vocab_size * C.d_model + count_norm_scales(C)
  parts = dataclasses.replace(SINGLE, num_microbatches=4)
  casts = 6 * (2 * kernels + others)
  assert weight_traffic(work(C, SINGLE)) == casts
  sums = 12 * (kernels + others)
  assert weight_traffic(work(C, parts)) == 4 * (casts + sums)
  float32 = dataclasses.replace(C, activation_dtype="float32")
  assert weight_traffic(work(float32, SINGLE)) == 0


def test_the_update_reads_and_writes_weights_and_slots():
  kept = DeviceBytes(weights=400, slots=800, gradients=200)
  assert update_traffic(kept) == 3 * 200 + 3 * 400 + 2 * 800


# 26.6M parameters: products of 1.9M weights.
SMALL = dataclasses.replace(PALM_8B, num_layers=6, d_model=512, num_heads=8)
SMALL = dataclasses.replace(SMALL, d_kv=64, d_ff=2048, vocab_size=8192)


def test_a_token_reads_every_weight_once():
  config = dataclasses.replace(SMALL, activation_dtype="bfloat16")
  table, scales = config.vocab_size * config.d_model, count_norm_scales(config)
  kernels = count_parameters(config) - table
  # Logits read the table as int8; norm scales are not quantized.
  rest = table + 2 * scales
  assert decode_weight_bytes(config, "int8") == kernels + rest
  # 32 numbers of 4 bits share a scale of 2 bytes.
  assert decode_weight_bytes(config, "int4") == kernels * 18 // 32 + rest
  # As int4, and 256 numbers share 8 bytes; logits read the table as q6_k.
  table_bytes = table * (6 * 32 + 8 * 2 + 8) // 256
  k_quants = {f"q{n}_k": kernels * (n * 32 + 24) // 256 for n in (4, 5, 6)}
  for name, size in k_quants.items():
    found = decode_weight_bytes(config, name)
    assert found == size + table_bytes + 2 * scales
  every = kernels + table + scales
  assert decode_weight_bytes(config, "activation") == 2 * every
  config = dataclasses.replace(SMALL, activation_dtype="float32")
  assert decode_weight_bytes(config, "activation") == 4 * every


@pytest.mark.parametrize(
  ("config", "dtype", "weight_dtype", "cores", "threads"),
  [
    (SMALL, "bfloat16", "int8", 16, 1),
    (SMALL, "bfloat16", "activation", 16, 1),
    (SMALL, "float32", "activation", 16, 2),
    (PALM_8B, "bfloat16", "int8", 16, 16),
    (PALM_8B, "bfloat16", "int8", 2, 2),
  ],
)
def test_few_bytes_are_read_by_one_thread_and_many_by_all_cores(
  config, dtype, weight_dtype, cores, threads
):
  config = dataclasses.replace(config, activation_dtype=dtype)
  assert step_threads(config, weight_dtype, cores) == threads


# Worked out from the sizes of Table 1: one head of 256 keys and one of values.
@pytest.mark.parametrize(
  ("config", "kibibytes", "of_all_heads"),
  [(PALM_8B, 32, 512), (PALM_62B, 64, 2048), (PALM_540B, 118, 5664)],
)
def test_a_token_keeps_one_head_a_layer_and_not_all(
  config, kibibytes, of_all_heads
):
  assert cache_bytes_per_token(config) == kibibytes * 1024
  every = dataclasses.replace(config, attention="multi_head")
  assert cache_bytes_per_token(every) == of_all_heads * 1024
