# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of training; model and hardware FLOPs utilization (PaLM Appendix B)."""

import collections
import functools
import math
from collections.abc import Mapping

from palm_mtf.architecture import parameters
from palm_mtf.architecture.attention_blocks import block_pairs
from palm_mtf.architecture.block import layer_of
from palm_mtf.config import MeshLayout, ModelConfig

SCORES = "attention/scores"


@functools.cache
def forward_flops(config: ModelConfig) -> Mapping[str, int]:
  """Returns {matrix product: FLOPs of a token's forward pass, all layers}.

  A product with a parameter has the parameter's name without the layer, such as
  "mlp/wi"; "embedding" or "output_embedding" gives the logits.
  "attention/scores" is attention to SEQUENCE_LENGTH positions. A multiply-add
  counts as 2 FLOPs.
  """
  products = {x.part for x in layer_of(config).projections}
  products.add(parameters.logits_table(config))
  terms: collections.Counter[str] = collections.Counter()
  for name, shape, n in parameters.distinct_parameters(config):
    if parameters.parse_name(name).part in products:
      terms[parameters.parse_name(name).part] += 2 * math.prod(shape) * n
  # Attention has two products: q k^T, and attention weights times v. With
  # Transformer-XL's positions, q is also multiplied by a vector per distance.
  # The half that the causal mask hides counts too, as in other papers.
  num_products = 3 if config.positions == "transformer_xl" else 2
  head_dims = config.num_layers * config.num_heads * config.d_kv
  terms[SCORES] = 2 * num_products * head_dims * config.sequence_length
  return terms


@functools.cache
def train_flops(
  config: ModelConfig, frozen: tuple[str, ...] = ()
) -> Mapping[str, int]:
  """Returns {matrix product: a token's FLOPs, forward and backward}.

  For each product, the backward pass computes the gradients of both factors. If
  a factor is a parameter, its gradient is computed only where it is trained
  (not where FROZEN matches it); the other gradient only in the layers that the
  backward pass visits. Products are named as in `forward_flops`.
  """
  layers = config.num_layers
  visited = layers - parameters.first_in_backward(config, frozen)
  trained = parameters.count_trained(config, frozen)
  logits, terms = parameters.logits_table(config), {}
  for term, forward in forward_flops(config).items():
    if term == logits:
      needs_input = visited or any(x.startswith("final_norm/") for x in trained)
      terms[term] = forward * (1 + bool(needs_input) + (term in trained))
      continue
    of_weight = f"{parameters.layer_name(0)}/{term}"
    updated = visited if term == SCORES else trained.get(of_weight, 0)
    terms[term] = forward // layers * (layers + visited + updated)
  return terms


@functools.cache
def recomputed_flops(
  config: ModelConfig, frozen: tuple[str, ...] = ()
) -> Mapping[str, int]:
  """Returns {matrix product: FLOPs per token that REMAT does a second time}."""
  layers = config.num_layers
  visited = layers - parameters.first_in_backward(config, frozen)
  forward = {
    term: n // layers * visited for term, n in forward_flops(config).items()
  }
  if config.remat == "none":
    return {}
  if config.remat == "attention":  # q k^T again, but not weights times v
    return {SCORES: forward[SCORES] // 2}
  # The backward pass does not repeat the last products of a block, because no
  # gradient needs their results. In a serial block, the MLP reads the output of
  # attention, so attention's output product (`o`) is repeated.
  unused = {parameters.logits_table(config), *layer_of(config).sums[-1].outputs}
  return {term: n for term, n in forward.items() if term not in unused}


def attention_flops_per_token(config: ModelConfig) -> int:
  """Returns a token's training FLOPs for attention to SEQUENCE_LENGTH keys."""
  return train_flops(config)[SCORES]


def train_flops_per_token(
  config: ModelConfig, frozen: tuple[str, ...] = ()
) -> int:
  """Returns the FLOPs of a token's forward and backward pass."""
  # FLOPs that REMAT repeats do not count, because MFU counts only the model's.
  return sum(train_flops(config, frozen).values())


def device_flops(
  config: ModelConfig,
  mesh: MeshLayout,
  pod_tokens: int,
  frozen: tuple[str, ...] = (),
) -> float:
  """Returns a device's FLOPs in a step of `pod_tokens` tokens per pod."""
  dims_of = {
    x.part: (*x.inputs, *x.outputs) for x in layer_of(config).projections
  }
  dims_of |= {SCORES: ("heads",), parameters.logits_table(config): ("vocab",)}
  repeated = recomputed_flops(config, frozen)
  flops, length = 0.0, config.sequence_length
  for term, of_training in train_flops(config, frozen).items():
    of_token: float = of_training + repeated.get(term, 0)
    if term == parameters.logits_table(
      config
    ):  # the table's padding rows have logits too
      of_token *= mesh.padded_vocab_size(config.vocab_size) / config.vocab_size
    if term == SCORES:  # fewer, because attention skips masked blocks
      pairs = block_pairs(length, config.has_prefix, config.attention_window)
      of_token *= sum(pairs) / length**2
    flops += of_token / math.prod(map(mesh.axis_size_of, dims_of[term]))
  return flops * pod_tokens / mesh.axis_size_of("batch")


def mfu(
  tokens_per_sec: float,
  config: ModelConfig,
  peak_flops_per_sec: float,
  frozen: tuple[str, ...] = (),
) -> float:
  """Returns the model FLOPs utilization, 1.0 at the peak.

  The tokens per second and the peak FLOP/s are those of all chips together.
  """
  flops = train_flops_per_token(config, frozen)
  return tokens_per_sec * flops / peak_flops_per_sec


def hfu(
  tokens_per_sec: float,
  config: ModelConfig,
  peak_flops_per_sec: float,
  frozen: tuple[str, ...] = (),
) -> float:
  """Returns the hardware FLOPs utilization: MFU that counts REMAT's FLOPs."""
  flops = train_flops_per_token(config, frozen)
  flops += sum(recomputed_flops(config, frozen).values())
  return tokens_per_sec * flops / peak_flops_per_sec
