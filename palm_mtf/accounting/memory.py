# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Memory of a device: what a step keeps there, and what it reads and writes.

Weights, slots and gradients; activations and buffers, tensors [batch, length,
...] of one microbatch; the weights and caches of decoding; and traffic: bytes
that passes read and write in device memory. Products are bound by arithmetic,
so their operands are not counted as traffic. A pass reads each of its inputs
once and writes each output once. Kinds of passes:

blocks     norms, residual sums, splits of joined products; the embedding
attention  the softmax of scores, and its gradient
loss       the cross entropy of logits, and its gradient
weights    casts, sums over microbatches, the update
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from palm_mtf.accounting.architecture import (
  attention_pairs,
  distinct_parameters,
  largest_block_pairs,
  parameter_dims,
  parameter_shapes,
  parse_name,
)
from palm_mtf.accounting.optimizer_state import (
  DTYPE_BYTES,
  optimizer_state,
  slot_bytes,
)
from palm_mtf.config import AdafactorConfig, MeshLayout, PalmConfig, PodsConfig

PASSES = ("blocks", "attention", "loss", "weights")

_FLOAT32 = DTYPE_BYTES["float32"]
# Kernels that are one matrix for a product (model/projection.py).
_JOINED = ("q", "k", "v", "wi_gate", "wi")

# A thread reads so many bytes in some 0.2 ms. To share fewer of them with
# another core costs more, in waiting for it, than the other core takes over:
# measured by tools/bench_decode.py on two cores.
_BYTES_FOR_A_THREAD = 4_000_000

# Of 4 bits, 32 numbers share a scale of 2 bytes.
_QUANTIZED_BYTES = {"int8": 1, "int4": 0.5 + 2 / 32}


@dataclasses.dataclass(frozen=True)
class DeviceBytes:
  """Bytes of one device, alike on all devices of a pod."""

  weights: int  # float32
  slots: int
  gradients: int  # of a step


@dataclasses.dataclass(frozen=True)
class ParameterSlice:
  """One device's slice of a parameter."""

  sizes: tuple[int, ...]  # of its dimensions, padding included
  axes: tuple[str, ...]  # mesh axes that split it, in the order of the mesh
  num_replicas: int  # devices with this slice

  @property
  def size(self) -> int:
    """Number of elements."""
    return math.prod(self.sizes)


def parameter_slices(
  config: PalmConfig, mesh: MeshLayout
) -> dict[str, ParameterSlice]:
  """Returns a device's slice of every parameter, by name."""
  slices = {}
  shapes = parameter_shapes(config)
  for name, dims in parameter_dims(config).items():
    # A stored parameter is split by the rule of d_model_stored, activations by
    # that of d_model_residual.
    split = ["d_model_stored" if dim == "d_model" else dim for dim in dims]
    # Rounded up: the last rows of the embedding may be padding.
    sizes = tuple(
      -(-size // mesh.axis_size_of(dim))
      for size, dim in zip(shapes[name], split, strict=True)
    )
    over = {mesh.rules.get(dim) for dim in split}
    axes = tuple(a for a, size in mesh.axes.items() if a in over and size > 1)
    parts = math.prod(mesh.axes[axis] for axis in axes)
    slices[name] = ParameterSlice(sizes, axes, mesh.num_devices // parts)
  return slices


# A search over layouts asks many thousand times, and layers are alike.
@functools.lru_cache(maxsize=16)
def distinct_slices(
  config: PalmConfig, mesh: MeshLayout
) -> Sequence[tuple[str, ParameterSlice, int]]:
  """Returns name and slice of every parameter of one layer, and of none.

  The third is how many there are alike: the number of layers, or 1.
  """
  one_layer = dataclasses.replace(config, num_layers=1)
  return [
    (name, each, 1 if parse_name(name).layer is None else config.num_layers)
    for name, each in parameter_slices(one_layer, mesh).items()
  ]


def gradient_bytes(name: str, config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of an element of a parameter's gradient."""
  # Microbatches are summed in float32.
  if mesh.num_microbatches > 1:
    return DTYPE_BYTES["float32"]
  return summed_bytes(name, config, mesh)


def summed_bytes(name: str, config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of an element of a gradient that devices add up."""
  if mesh.gradient_dtype == "float32" or parse_name(name).is_scale:
    return DTYPE_BYTES["float32"]
  return DTYPE_BYTES[config.activation_dtype]


def device_bytes(
  config: PalmConfig, mesh: MeshLayout, optimizer: AdafactorConfig
) -> DeviceBytes:
  """Returns the bytes of one device."""
  slices = distinct_slices(config, mesh)
  state = optimizer_state(optimizer)
  return DeviceBytes(
    weights=sum(4 * each.size * n for _, each, n in slices),
    # Slots are split as their parameter is.
    slots=sum(slot_bytes({x: each.sizes}, state) * n for x, each, n in slices),
    gradients=sum(
      gradient_bytes(name, config, mesh) * each.size * n
      for name, each, n in slices
    ),
  )


@dataclasses.dataclass(frozen=True)
class Widths:
  """Numbers that one token has on a device, in the tensors of a block."""

  stream: int  # d_model
  residual: int  # d_model between blocks, where a rule splits it
  queries: int
  keys_and_values: int
  scores: float  # mean over positions
  block_scores: float  # of the block of positions that attends
  hidden: int
  vocab: int

  @property
  def columns(self) -> int:
    """Columns of the product with q, k, v, wi_gate and wi."""
    return self.queries + self.keys_and_values + 2 * self.hidden


def widths(config: PalmConfig, mesh: MeshLayout) -> Widths:
  """Returns the widths of a block's tensors on one device."""
  heads = config.num_heads // mesh.axis_size_of("heads")
  kv_heads = heads if config.attention == "multi_head" else 1
  length, has_prefix = config.sequence_length, config.has_prefix
  padded = mesh.padded_vocab_size(config.vocab_size)
  return Widths(
    stream=config.d_model,
    residual=config.d_model // mesh.axis_size_of("d_model_residual"),
    queries=heads * config.d_kv,
    keys_and_values=2 * kv_heads * config.d_kv,
    scores=heads * attention_pairs(length, has_prefix) / length,
    block_scores=heads * largest_block_pairs(length, has_prefix) / length,
    hidden=config.d_ff // mesh.axis_size_of("d_ff"),
    vocab=padded // mesh.axis_size_of("vocab"),
  )


def device_tokens(
  config: PalmConfig, mesh: MeshLayout, pod_batch_size: int
) -> int:
  """Returns the tokens of a microbatch on a device."""
  rows = pod_batch_size // mesh.num_microbatches
  return rows // mesh.axis_size_of("batch") * config.sequence_length


def block_numbers(config: PalmConfig, mesh: MeshLayout) -> float:
  """Returns the numbers a token that a block keeps for the backward pass.

  Without REMAT, or while REMAT = "layer" computes the block again.
  """
  w = widths(config, mesh)
  norms = 1 if config.block == "parallel" else 2
  # Inputs of norms, the joined product, and the result of attention.
  kept = norms * w.stream + w.columns + w.queries
  # Attention weights, which REMAT = "attention" computes again.
  return kept + (0 if config.remat == "attention" else w.scores)


def kept_bytes(
  config: PalmConfig, mesh: MeshLayout, pod_batch_size: int
) -> int:
  """Returns the bytes of all blocks that the forward pass leaves behind."""
  w = widths(config, mesh)
  of_block = block_numbers(config, mesh)
  if config.remat == "layer":
    of_block = w.residual  # the block's input
  tokens = device_tokens(config, mesh, pod_batch_size)
  width = DTYPE_BYTES[config.activation_dtype]
  return round(tokens * config.num_layers * of_block * width)


def loss_bytes(
  config: PalmConfig, mesh: MeshLayout, pod_batch_size: int
) -> int:
  """Returns the bytes of the last norm's input, logits and their gradient."""
  w, width = widths(config, mesh), DTYPE_BYTES[config.activation_dtype]
  logits = _FLOAT32 if config.logits_dtype == "float32" else width
  of_token = w.stream * width + w.vocab * (logits + width)
  return device_tokens(config, mesh, pod_batch_size) * of_token


def working_bytes(
  config: PalmConfig, mesh: MeshLayout, pod_batch_size: int
) -> int:
  """Returns the most bytes of activations beside the kept ones."""
  w, width = widths(config, mesh), DTYPE_BYTES[config.activation_dtype]
  # The backward pass of a block: gradients of attention weights and scores, of
  # the product and what is read of it, of the stream; and a norm, q, k, v and
  # the hidden layer, which are computed again.
  of_token = 2 * w.block_scores + 2 * w.columns + 2 * w.stream
  of_token += w.stream + w.queries + w.keys_and_values + w.hidden
  if config.remat == "layer":
    of_token += block_numbers(config, mesh)
  elif config.remat == "attention":
    of_token += w.block_scores
  tokens = device_tokens(config, mesh, pod_batch_size)
  of_block = round(tokens * of_token * width)
  return max(of_block, loss_bytes(config, mesh, pod_batch_size))


def weight_copy_bytes(config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of weights as products read them: cast, gathered, joined.

  Those of one layer, and of the embedding, which is kept from the loss on; and
  their gradients, whole until they are scattered. The float32 weights
  themselves are not counted.
  """
  width = DTYPE_BYTES[config.activation_dtype]
  stored = mesh.axis_size_of("d_model_stored")
  total = 0
  for name, each, _ in distinct_slices(config, mesh):
    parameter = parse_name(name)
    if parameter.is_scale:
      continue
    copies = 0 if width == _FLOAT32 else 1
    copies += 2 * stored if stored > 1 else 0  # and the gradient
    copies += stored if parameter.last in _JOINED else 0
    total += copies * width * each.size
  return total


def exchange_bytes(
  config: PalmConfig, mesh: MeshLayout, pods: PodsConfig
) -> int:
  """Returns the bytes of other pods' gradients, and of the sum with them."""
  if pods.num_pods == 1:
    return 0
  width = DTYPE_BYTES[pods.dcn_dtype]
  total = 0
  for _, each, count in distinct_slices(config, mesh):
    part = -(-each.size // each.num_replicas)
    of_others = part * width * (pods.num_pods - 1)
    total += count * (of_others + each.size * _FLOAT32)
  return total


def block_passes(config: PalmConfig, mesh: MeshLayout) -> dict[str, float]:
  """Returns numbers a token that a block's passes move in a step, by kind.

  Args:
    config: architecture.
    mesh: devices of a pod and layout rules.
  """
  w = widths(config, mesh)
  norms = 1 if config.block == "parallel" else 2
  read = w.queries + w.keys_and_values + w.hidden
  # Each norm, its residual sum; what is read of the product; the softmax.
  forward = {
    "blocks": norms * (2 * w.stream + 3 * w.residual) + w.columns + read,
    "attention": 2 * w.scores,
  }
  # The same again: a norm reads two and writes one, and a sum of gradients; the
  # product is read, and its gradient made of those of its parts; of attention
  # weights and their gradient comes that of the scores, and of two results.
  backward = {
    "blocks": norms * (3 * w.stream + 3 * w.residual) + 2 * w.columns + read,
    "attention": 3 * w.scores + 2 * w.queries,
  }
  # Before it, norms and what is read of a product (ops/recompute.py).
  again = {"blocks": norms * 2 * w.stream + w.columns + read}
  repeated = {
    "none": again,
    "attention": {**again, "attention": forward["attention"]},
    "layer": forward,
  }[config.remat]
  return {x: forward[x] + backward[x] + repeated.get(x, 0) for x in forward}


def activation_traffic(
  config: PalmConfig, mesh: MeshLayout, pod_batch_size: int
) -> dict[str, int]:
  """Returns the bytes of passes over activations in a step, of a device."""
  w, width = widths(config, mesh), DTYPE_BYTES[config.activation_dtype]
  logits = _FLOAT32 if config.logits_dtype == "float32" else width
  of_token = {
    kind: config.num_layers * width * numbers
    for kind, numbers in block_passes(config, mesh).items()
  }
  # The last norm, twice, and the embedding's rows, and their gradients, which
  # are summed in float32.
  of_token["blocks"] += w.stream * (7 * width + 3 * width + 2 * _FLOAT32)
  # The sums of a row, and the gradient, which is written.
  of_token["loss"] = w.vocab * (2 * logits + width)
  tokens = mesh.num_microbatches * device_tokens(config, mesh, pod_batch_size)
  return {kind: round(tokens * each) for kind, each in of_token.items()}


def weight_traffic(config: PalmConfig, mesh: MeshLayout) -> int:
  """Returns the bytes of weights cast, and of gradients summed, in a step."""
  width = DTYPE_BYTES[config.activation_dtype]
  total = 0
  for name, each, count in distinct_slices(config, mesh):
    of_number = 0
    if width != _FLOAT32:  # read and written, kernels on the way back too
      passes = 2 if parse_name(name).is_kernel else 1
      of_number += passes * (_FLOAT32 + width)
    if mesh.num_microbatches > 1:  # the sum read and written, a gradient read
      of_number += 2 * _FLOAT32 + gradient_bytes(name, config, mesh)
    total += count * of_number * each.size
  return mesh.num_microbatches * total


def update_traffic(kept: DeviceBytes) -> int:
  """Returns the bytes that the optimizer moves in a step.

  Args:
    kept: bytes of weights, slots and gradients of the device.
  """
  # A gradient is read for the norm of all, for its moment and for its update; a
  # weight for its scale and, with each slot, to be read and written.
  return 3 * kept.gradients + 3 * kept.weights + 2 * kept.slots


def step_traffic(
  config: PalmConfig, mesh: MeshLayout, kept: DeviceBytes, pod_batch_size: int
) -> dict[str, int]:
  """Returns the bytes of all passes in a step, of a device, by kind."""
  weights = weight_traffic(config, mesh) + update_traffic(kept)
  return {
    **activation_traffic(config, mesh, pod_batch_size),
    "weights": weights,
  }


def decode_weight_bytes(config: PalmConfig, weight_dtype: str) -> int:
  """Returns the bytes of all weights, which a decoding step reads once."""
  is_quantized = weight_dtype != "activation"
  total = 0
  for name, shape, n in distinct_parameters(config):
    dtype = weight_dtype if parse_name(name).is_kernel else "activation"
    if name == "embedding" and is_quantized:
      dtype = "int8"  # as logits read it (generation/decode/weights.py)
    width = _QUANTIZED_BYTES.get(dtype, DTYPE_BYTES[config.activation_dtype])
    total += int(math.prod(shape) * width) * n
  return total


def cache_bytes_per_token(config: PalmConfig) -> int:
  """Returns the bytes of a token's keys and values in all layers."""
  heads = config.num_heads if config.attention == "multi_head" else 1
  width = DTYPE_BYTES[config.activation_dtype]
  return 2 * config.num_layers * heads * config.d_kv * width


def step_threads(config: PalmConfig, weight_dtype: str, cores: int) -> int:
  """Returns the number of threads for the products of a decoding step.

  Args:
    config: architecture.
    weight_dtype: WEIGHT_DTYPE.
    cores: number of cores, the most threads.
  """
  # A parallel block has two products, [q k v wi_gate wi] and [o wo], a serial
  # block four. One more gives the logits.
  products_a_layer = 2 if config.block == "parallel" else 4
  products = products_a_layer * config.num_layers + 1
  mean = decode_weight_bytes(config, weight_dtype) / products
  return max(1, min(cores, int(mean / _BYTES_FOR_A_THREAD)))
