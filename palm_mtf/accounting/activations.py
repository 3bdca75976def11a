# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Activations of a step, and the other buffers it needs for a while, by device.

Tensors are those of one microbatch, [batch, length, ...], on one device.
"""

import dataclasses

from palm_mtf.accounting.memory import distinct_slices
from palm_mtf.accounting.optimizer_state import DTYPE_BYTES
from palm_mtf.config.attention_blocks import (
  attention_pairs,
  largest_block_pairs,
)
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import parsed
from palm_mtf.config.pods import PodsConfig

_FLOAT32 = DTYPE_BYTES["float32"]
# Kernels that are one matrix for a product (model/projection.py).
_JOINED = ("q", "k", "v", "wi_gate", "wi")


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
    parameter = parsed(name)
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
