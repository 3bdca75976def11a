# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""FLOPs of training; model and hardware FLOPs utilization (PaLM Appendix B)."""

import collections
import functools
import math
from collections.abc import Mapping

from palm_mtf.accounting.work import Work
from palm_mtf.architecture import parameters
from palm_mtf.architecture.adapter import B
from palm_mtf.architecture.attention_blocks import block_pairs
from palm_mtf.architecture.block import ENCODER, ROUTER, Layer, model_of
from palm_mtf.config import ModelConfig
from palm_mtf.config.neighbours import num_neighbours

SCORES = "attention/scores"


def forward_flops(config: ModelConfig) -> Mapping[str, int]:
  """Returns {matrix product: FLOPs of a token's forward pass, all layers}.

  A product with a parameter has the parameter's name without the layer, such as
  "mlp/wi"; "embedding" or "output_embedding" gives the logits.
  "attention/scores" is attention to SEQUENCE_LENGTH positions. A multiply-add
  counts as 2 FLOPs.
  """
  kinds = model_of(config).kinds
  return _sum_products(config, {x.layer: x.count for x in kinds})


@functools.cache
def _flops_of_layers(config: ModelConfig) -> Mapping[Layer, Mapping[str, int]]:
  """Returns {kind of layers: {matrix product: FLOPs of one such layer}}."""
  kinds = {x.first: x.layer for x in model_of(config).kinds}
  products = _product_dims(config)
  terms: dict[Layer, dict[str, int]] = {x: {} for x in kinds.values()}
  for each in parameters.distinct_parameters(config):
    layer, part = parameters.parse_name(each.name)
    if layer is not None and part in products:
      flops = 2 * _count_active(each, config)
      terms[kinds[layer]][part] = flops * _count_passes(part, config)
  # Attention has two products: q k^T, and attention weights times v. With
  # Transformer-XL's positions, q is also multiplied by a vector per distance.
  # The half that the causal mask hides counts too, as in other papers, and so
  # does what a window hides.
  of_product = 2 * config.num_heads * config.d_kv * config.sequence_length
  for layer, own in terms.items():
    has_vectors = layer.attention.mixer.score_positions == "transformer_xl"
    own[SCORES] = of_product * (3 if has_vectors else 2)
    if layer.crosses:  # of a token: 4, 2 and 2 pairs per neighbour and position
      pairs = 8 * num_neighbours(config) * config.chunk_length
      own[SCORES] += 4 * config.num_heads * config.d_kv * pairs
  return terms


def _count_passes(part: str, config: ModelConfig) -> int:
  """Returns how many positions, per token of a row, a product has."""
  of_neighbours = ENCODER, "condition/q", "condition/o", "cross/k", "cross/v"
  is_of_them = part.startswith(of_neighbours)
  return 2 * num_neighbours(config) if is_of_them else 1


def _count_active(
  each: parameters.DistinctParameter, config: ModelConfig
) -> int:
  """Returns how many numbers of a parameter compute one token."""
  size = math.prod(each.shape)
  if not parameters.parse_name(each.name).is_expert:
    return size
  assert config.experts_per_token and config.num_experts
  return size * config.experts_per_token // config.num_experts


def active_parameters(config: ModelConfig) -> int:
  """Counts the parameters that compute one token, without norm scales.

  Of experts, these are the ones that a token uses. Tables count whole, as in
  `count_parameters`.
  """
  unused = sum(
    x.count * (math.prod(x.shape) - _count_active(x, config))
    for x in parameters.distinct_parameters(config)
  )
  return parameters.count_parameters(config) - unused


def _sum_products(
  config: ModelConfig, counts: Mapping[Layer, int]
) -> dict[str, int]:
  """Returns `forward_flops`, with `counts` layers of each kind."""
  total: collections.Counter[str] = collections.Counter()
  for layer, terms in _flops_of_layers(config).items():
    for term, flops in terms.items():
      total[term] += flops * counts.get(layer, 0)
  of_table = 2 * config.vocab_size * config.d_model
  return {parameters.logits_table(config): of_table, **total}


def _product_dims(config: ModelConfig) -> dict[str, tuple[str, ...]]:
  """Returns {matrix product: dimensions of its parameter} of all layers."""
  dims: dict[str, tuple[str, ...]] = {}
  for kind in model_of(config).kinds:
    for prefix, each in kind.layer.all_sums:
      for branch in each.branches:
        for x in (*branch.inputs, branch.output):
          dims[prefix + x.part] = (*x.inputs, *x.outputs)
          dims |= x.factors
  return dims | {parameters.logits_table(config): ("vocab",)}


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
  trained = parameters.count_trained(config, frozen)
  visited = parameters.count_visited(config, frozen)
  logits = parameters.logits_table(config)
  needs_input = visited or any(x.startswith("final_norm/") for x in trained)
  times = 1 + bool(needs_input) + (logits in trained)
  terms = collections.Counter({logits: forward_flops(config)[logits] * times})
  for layer, first, count in model_of(config).kinds:
    for term, flops in _flops_of_layers(config)[layer].items():
      name = f"{parameters.layer_name(first)}/{term}"
      updated = visited[layer] if term == SCORES else trained.get(name, 0)
      terms[term] += flops * (count + visited[layer] + updated)
  return terms


@functools.cache
def recomputed_flops(
  config: ModelConfig, frozen: tuple[str, ...] = ()
) -> Mapping[str, int]:
  """Returns {matrix product: FLOPs per token that REMAT does a second time}."""
  visited = parameters.count_visited(config, frozen)
  forward = _sum_products(config, visited)
  # The backward pass repeats a router's product and the first product with the
  # factors of an adapted output kernel. For the gradient of a magnitude, it
  # repeats all products of this kernel.
  outputs = [
    x.output
    for kind in model_of(config).kinds
    for x in kind.layer.branches
    if x.output.low_rank
  ]
  again = {
    name: forward[name]
    for x in outputs
    for name in (
      (x.part, *x.factors) if x.magnitude in x.vectors else [*x.factors][:1]
    )
  }
  again |= {x: n for x, n in forward.items() if x == ROUTER}
  if config.remat == "none":
    return again
  if config.remat == "attention":  # q k^T again, but not weights times v
    return {SCORES: forward[SCORES] // 2, **again}
  # The backward pass does not repeat the last products of a block, because no
  # gradient needs their results, except that of a norm of the results. In a
  # serial block, the MLP reads the output of attention, so attention's output
  # product (`o`) is repeated.
  unused = {parameters.logits_table(config)}
  for kind in model_of(config).kinds:
    last = kind.layer.sums[-1]
    if last.output_norm is None:
      for x in last.branches:
        unused |= {x.output.part, *x.output.factors}
  unused -= again.keys()
  return {term: n for term, n in forward.items() if term not in unused}


def train_flops_per_token(
  config: ModelConfig, frozen: tuple[str, ...] = ()
) -> int:
  """Returns the FLOPs of a token's forward and backward pass."""
  # FLOPs that REMAT repeats do not count, because MFU counts only the model's.
  return sum(train_flops(config, frozen).values())


def device_flops(work: Work) -> float:
  """Returns a device's FLOPs in a step."""
  config, mesh, frozen = work.model, work.mesh, work.frozen
  dims_of = _product_dims(config) | {SCORES: ("heads",)}
  # One product has the factors B of all kernels that read a norm, with zeros
  # where a factor meets another kernel's columns.
  joined = {
    f"{x.part}{B}": len(adapted)
    for kind in model_of(config).kinds
    for read in kind.layer.reads
    for adapted in [[x for x in read.projections if x.low_rank]]
    for x in adapted
  }
  repeated, length = recomputed_flops(config, frozen), config.sequence_length
  flops = row_share = 0.0
  if experts := model_of(config).experts:
    row_share = work.expert_rows(experts) / experts.per_token
  for term, of_training in train_flops(config, frozen).items():
    of_token: float = of_training + repeated.get(term, 0)
    of_token *= joined.get(term, 1)
    # The table's padding rows have logits too.
    if term == parameters.logits_table(config):
      of_token *= mesh.padded_vocab_size(config.vocab_size) / config.vocab_size
    if term == SCORES:  # fewer, because attention skips masked blocks
      pairs = sum(
        x.count * sum(block_pairs(length, config.has_prefix, window))
        for x in model_of(config).kinds
        for window in [x.layer.attention.mixer.window]
      )
      of_token *= pairs / (config.num_layers * length**2)
    dims = dims_of[term]
    if (mesh.moves_tokens or mesh.tpu) and "experts" in dims:
      # Each device multiplies all its rows, also those without a token.
      dims = tuple(x for x in dims if x != "experts")
      of_token *= row_share
    flops += of_token / math.prod(map(mesh.axis_size_of, dims))
  return flops * work.rows * length / mesh.axis_size_of("batch")


def utilization(
  tokens_per_sec: float,
  config: ModelConfig,
  peak_flops_per_sec: float,
  frozen: tuple[str, ...] = (),
) -> dict[str, float]:
  """Returns {"mfu": model FLOPs utilization, "hfu": that of the hardware}.

  1.0 is the peak. HFU also counts the FLOPs that REMAT repeats. The tokens per
  second and the peak FLOP/s are those of all chips together.
  """
  of_model = train_flops_per_token(config, frozen)
  repeated = sum(recomputed_flops(config, frozen).values())
  return {
    name: tokens_per_sec * flops / peak_flops_per_sec
    for name, flops in (("mfu", of_model), ("hfu", of_model + repeated))
  }
