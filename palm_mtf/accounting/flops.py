# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of training; model and hardware FLOPs utilization (PaLM Appendix B)."""

import collections
import functools
import math
from collections.abc import Mapping

from palm_mtf.architecture import parameters
from palm_mtf.architecture.attention_blocks import block_pairs
from palm_mtf.architecture.block import Attention, model_of
from palm_mtf.config import MeshLayout, ModelConfig

SCORES = "attention/scores"
# Training takes three times the forward pass's FLOPs: for each matrix product,
# the backward pass computes the gradients of both factors.
_PASSES = 3


@functools.cache
def forward_flops(config: ModelConfig) -> Mapping[str, int]:
  """Returns {matrix product: FLOPs of a token's forward pass, all layers}.

  A product with a parameter has the parameter's name without the layer, such as
  "mlp/wi"; "embedding" or "output_embedding" gives the logits.
  "attention/scores" is attention to SEQUENCE_LENGTH positions. A multiply-add
  counts as 2 FLOPs.
  """
  products = _product_dims(config)
  terms: collections.Counter[str] = collections.Counter()
  for each in parameters.distinct_parameters(config):
    part = parameters.parse_name(each.name).part
    if part in products:
      terms[part] += 2 * math.prod(each.shape) * each.count
  # Attention has two products: q k^T, and attention weights times v. With
  # Transformer-XL's positions, q is also multiplied by a vector per distance.
  # The half that the causal mask hides counts too, as in other papers, and so
  # does what a window hides.
  of_product = 2 * config.num_heads * config.d_kv * config.sequence_length
  terms[SCORES] = of_product * sum(
    count * (3 if mixer.score_positions == "transformer_xl" else 2)
    for mixer, count in _mixers(config)
  )
  return terms


def _mixers(config: ModelConfig) -> list[tuple[Attention, int]]:
  """Returns (how a kind of layers attends, number of these layers)."""
  kinds = model_of(config).kinds
  return [(x.layer.attention.mixer, x.count) for x in kinds]


def _product_dims(config: ModelConfig) -> dict[str, tuple[str, ...]]:
  """Returns {matrix product: dimensions of its parameter} of all layers."""
  dims = {
    x.part: (*x.inputs, *x.outputs)
    for kind in model_of(config).kinds
    for x in kind.layer.projections
  }
  return dims | {parameters.logits_table(config): ("vocab",)}


@functools.cache
def recomputed_flops(config: ModelConfig) -> Mapping[str, int]:
  """Returns {matrix product: FLOPs per token that REMAT does a second time}."""
  forward = forward_flops(config)
  if config.remat == "none":
    return {}
  if config.remat == "attention":  # q k^T again, but not weights times v
    return {SCORES: forward[SCORES] // 2}
  # The backward pass does not repeat the last products of a block, because no
  # gradient needs their results, except that of a norm of the results. In a
  # serial block, the MLP reads the output of attention, so attention's output
  # product (`o`) is repeated.
  unused = {parameters.logits_table(config)}
  for kind in model_of(config).kinds:
    last = kind.layer.sums[-1]
    unused |= {*last.outputs} if last.output_norm is None else set()
  return {term: n for term, n in forward.items() if term not in unused}


def attention_flops_per_token(config: ModelConfig) -> int:
  """Returns a token's training FLOPs for attention to SEQUENCE_LENGTH keys."""
  return _PASSES * forward_flops(config)[SCORES]


def train_flops_per_token(config: ModelConfig) -> int:
  """Returns the FLOPs of a token's forward and backward pass."""
  # FLOPs that REMAT repeats do not count, because MFU counts only the model's.
  return _PASSES * sum(forward_flops(config).values())


def device_flops(
  config: ModelConfig, mesh: MeshLayout, pod_tokens: int
) -> float:
  """Returns a device's FLOPs in a step of `pod_tokens` tokens per pod."""
  dims_of = _product_dims(config) | {SCORES: ("heads",)}
  repeated, length = recomputed_flops(config), config.sequence_length
  flops = 0.0
  for term, forward in forward_flops(config).items():
    of_token = _PASSES * forward + repeated.get(term, 0)
    if term == parameters.logits_table(
      config
    ):  # the table's padding rows have logits too
      of_token *= mesh.padded_vocab_size(config.vocab_size) / config.vocab_size
    if term == SCORES:  # fewer, because attention skips masked blocks
      pairs = sum(
        count * sum(block_pairs(length, config.has_prefix, mixer.window))
        for mixer, count in _mixers(config)
      )
      of_token *= pairs / (config.num_layers * length**2)
    flops += of_token / math.prod(map(mesh.axis_size_of, dims_of[term]))
  return flops * pod_tokens / mesh.axis_size_of("batch")


def mfu(
  tokens_per_sec: float, config: ModelConfig, peak_flops_per_sec: float
) -> float:
  """Returns the model FLOPs utilization, 1.0 at the peak.

  The tokens per second and the peak FLOP/s are those of all chips together.
  """
  return tokens_per_sec * train_flops_per_token(config) / peak_flops_per_sec


def hfu(
  tokens_per_sec: float, config: ModelConfig, peak_flops_per_sec: float
) -> float:
  """Returns the hardware FLOPs utilization: MFU that counts REMAT's FLOPs."""
  flops = train_flops_per_token(config) + sum(recomputed_flops(config).values())
  return tokens_per_sec * flops / peak_flops_per_sec
