# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks that tests try, and what the oracle computes for a batch.

Whatever computes a model is compared in the same way: `make_case` has a small
model of a block, a batch and the oracle's numbers, and `check` compares these
with the numbers of a run. block_test.py lists what is compared.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping

import numpy as np
import pytest

from palm_mtf.config import ModelConfig
from tests import oracle
from tests.cases import slow
from tests.mtf_testing import (
  ModelResult,
  random_tokens,
  relative_error,
  small_config,
)

_LLAMA = dict(
  block="serial",
  norm="rms_norm",
  norm_epsilon=1e-5,
  attention="multi_head",
  output_embedding="separate",
  logits_scale=1.0,
)
_GPT2 = dict(
  block="serial",
  norm="layer_norm_bias",
  norm_epsilon=1e-5,
  attention="multi_head",
  positions="learned",
  mlp="gelu_tanh",
  biases="qkv,o,mlp",
  logits_scale=1.0,
)
_GPTJ = dict(
  block="parallel",
  norm="layer_norm_bias",
  attention="multi_head",
  mlp="gelu_tanh",
  rotary_fraction=0.4,
  rotary_pairs="neighbours",
  biases="mlp,logits",
  output_embedding="separate",
  logits_scale=1.0,
)
_GQA = dict(attention="grouped_query", num_kv_heads=2)
# Pairs of all three kinds: fast, slow and between. Most positions are beyond
# the original length.
BY_TURNS = dict(
  rotary_base=10.0,
  rotary_factor=3.0,
  rotary_original_length=4,
  rotary_slow=0.2,
  rotary_fast=0.5,
)

# {name: settings}. Together they have each value of each setting, and the mixed
# ones have the values that no known model combines.
SETTINGS = {
  "LLaMA": _LLAMA,
  "Yarn LLaMA 2": {**_LLAMA, **BY_TURNS, "rotary_scaling": "yarn"},
  "LLaMA 3": {**_LLAMA, **_GQA, "rotary_base": 5e5},
  "LLaMA 3.1": {**_LLAMA, **_GQA, **BY_TURNS, "rotary_scaling": "llama3"},
  "Mistral": {**_LLAMA, **_GQA, "attention_window": 3},
  "Qwen 3": {**_LLAMA, **_GQA, "qk_norm": "rms_norm"},
  "Gemma": dict(
    block="serial",
    norm="rms_norm_1p",
    mlp="geglu_tanh",
    embedding_scale=24**0.5,
    logits_scale=1.0,
  ),
  # Window layers have the plain rotary embedding of a short context.
  "Gemma 3": dict(
    _GQA,
    num_layers=4,
    layers="window, global",
    variants={
      "window": {"ATTENTION_WINDOW": 3},
      "global": {
        "ROTARY_BASE": 5e5,
        "ROTARY_SCALING": "linear",
        "ROTARY_FACTOR": 2.0,
      },
    },
    block="serial",
    norm="rms_norm_1p",
    branch_norm=True,
    qk_norm="rms_norm_1p",
    score_scale=0.4,
    mlp="geglu_tanh",
    embedding_scale=24**0.5,
    logits_scale=1.0,
  ),
  "Cohere 2": dict(
    _GQA,
    num_layers=3,
    layers="2*window, global",
    variants={
      "window": {"ATTENTION_WINDOW": 3},
      "global": {"POSITIONS": "none"},
    },
    rotary_pairs="neighbours",
    rotary_base=5e4,
    logits_scale=0.3,
  ),
  "GPT-2": _GPT2,
  "GPT-3": dict(
    _GPT2,
    layers="dense, banded",
    variants={"dense": {}, "banded": {"ATTENTION_WINDOW": 4}},
  ),
  "GPT-J": _GPTJ,
  "GPT-NeoX": dict(
    _GPTJ,
    block="parallel_two_norms",
    mlp="gelu",
    rotary_pairs="halves",
    biases="qkv,o,mlp",
  ),
  "Phi": dict(_GPTJ, rotary_pairs="halves", biases="qkv,o,mlp,logits"),
  "Gopher": dict(
    block="serial",
    norm="rms_norm",
    attention="multi_head",
    positions="transformer_xl",
    mlp="gelu",
  ),
  "LaMDA": dict(
    block="serial",
    norm="rms_norm",
    attention="multi_head",
    positions="t5",
    mlp="geglu",
  ),
  "BLOOM": dict(_GPT2, positions="alibi"),
  "no positions": dict(positions="none", mlp="relu2"),
  "Transformer-XL in groups": dict(
    _GQA,
    positions="transformer_xl",
    mlp="relu",
    attention_window=4,
    block="parallel_two_norms",
  ),
  "ALiBi with a norm of q and k": dict(
    _GQA,
    positions="alibi",
    qk_norm="rms_norm",
    attention_window=2,
    norm="rms_norm_1p",
    mlp="geglu",
    biases="o",
    final_norm_scale="none",
  ),
  "T5 with one key head": dict(
    positions="t5", biases="qkv", norm="layer_norm_bias", block="serial"
  ),
  "Transformer-XL with norms of results": dict(
    positions="transformer_xl",
    score_scale=0.5,
    branch_norm=True,
    biases="o,mlp",
    norm="layer_norm_bias",
    block="serial",
    mlp="relu",
  ),
  "Mixtral": dict(
    _LLAMA, **_GQA, mlp="experts", num_experts=6, experts_per_token=2
  ),
  "OLMoE": dict(
    _LLAMA,
    mlp="experts",
    num_experts=6,
    experts_per_token=3,
    d_expert=14,
    router_normalizes=False,
  ),
  "DeepSeek-V3": dict(
    _LLAMA,
    num_layers=3,
    layers="dense, 2*sparse",
    variants={"dense": {}, "sparse": {"MLP": "experts"}},
    num_experts=6,
    experts_per_token=3,
    d_expert=14,
    shared_experts=2,
    router="sigmoid",
    router_scale=2.5,
    router_bias=True,
  ),
}


# A norm of all heads together, which no layout rule may split.
ALL_HEADS = {
  "OLMoE with its norm": dict(SETTINGS["OLMoE"], qk_norm="rms_norm_all_heads"),
  "norms of groups of heads": dict(
    _GQA, qk_norm="rms_norm_all_heads", biases="qkv"
  ),
}

# Experts that take a limited number of tokens, except in decoding.
CAPACITY = {
  "GLaM": dict(
    block="serial",
    norm="rms_norm",
    attention="multi_head",
    positions="t5",
    layers="dense, sparse",
    variants={"dense": {"MLP": "geglu"}, "sparse": {}},
    mlp="experts",
    expert_mlp="gelu",
    num_experts=4,
    experts_per_token=2,
    capacity_factor=1.0,
  ),
  "Switch": dict(
    mlp="experts",
    expert_mlp="relu",
    num_experts=4,
    experts_per_token=1,
    router_normalizes=False,
    capacity_factor=1.25,
  ),
}

# PaLM's block with each norm, order and kind of heads.
PALM = {
  f"{norm} {block} {attention}": dict(
    norm=norm, block=block, attention=attention
  )
  for norm, block, attention in itertools.product(
    ("layer_norm", "rms_norm"),
    ("parallel", "serial"),
    ("multi_query", "multi_head"),
  )
}
PALM["no final scale"] = dict(final_norm_scale="none")

# Mixtures of settings that a Unitransformer has, too. Its scales of embeddings
# and logits are PaLM's.
MIXTURES = {
  "in groups": dict(
    _GQA,
    norm="rms_norm_1p",
    mlp="geglu_tanh",
    rotary_fraction=0.4,
    rotary_pairs="neighbours",
    rotary_base=5e5,
    rotary_scaling="linear",
    rotary_factor=2.0,
    biases="qkv",
  ),
  "GPT-2 with ALiBi": dict(
    block="serial",
    norm="layer_norm_bias",
    norm_epsilon=1e-4,
    attention="multi_head",
    positions="alibi",
    mlp="gelu_tanh",
    biases="o,mlp",
  ),
  "Transformer-XL": dict(
    _GQA, positions="transformer_xl", attention_window=4, mlp="relu"
  ),
  "T5": dict(block="serial", norm="rms_norm", positions="t5", mlp="geglu"),
  "multi-head": dict(
    attention="multi_head", mlp="relu2", qk_norm="rms_norm", score_scale=0.5
  ),
  "without positions": dict(positions="none", mlp="gelu", biases="mlp"),
}


def fast_only(*names: str) -> list:
  """Returns all names of SETTINGS as parameters of a test; others are slow."""
  return [name if name in names else slow(name) for name in SETTINGS]


def block_config(name: str, **changes: object) -> ModelConfig:
  """Returns a small model with the settings of a name."""
  every = {**SETTINGS, **PALM, **MIXTURES, **CAPACITY, **ALL_HEADS}
  settings = every[name]
  return small_config(**{**settings, **changes})


Z_LOSS = 0.1  # large, so that its gradient counts


@dataclasses.dataclass(frozen=True)
class Case:
  """A model and a batch, with the oracle's numbers.

  Attributes:
    losses: the mean cross-entropy, and the z-loss with the weight Z_LOSS.
    slopes: {parameter: (direction, slope of the sum of losses along it)}.
    states: {state of a router: how many tokens chose each expert}.
  """

  config: ModelConfig
  params: Mapping[str, np.ndarray]
  batch: Mapping[str, np.ndarray]
  logits: np.ndarray
  losses: tuple[float, float]
  slopes: Mapping[str, tuple[np.ndarray, float]]
  states: Mapping[str, np.ndarray]


@functools.cache
def make_case(
  name: str, rows: Callable[..., dict] = random_tokens, **changes: object
) -> Case:
  """Returns two rows of `rows`, without target 0, which some models mask."""
  config = block_config(name, **changes)
  params = oracle.random_parameters(config, seed=1)
  batch = rows(config, batch_size=2, seed=2)
  batch["targets"] = np.maximum(batch["targets"], 1)

  def losses(params):
    return oracle.loss(config, params, **batch, z_loss=Z_LOSS)

  rng = np.random.default_rng(3)
  slopes = {}
  for key, value in params.items():
    direction = rng.standard_normal(value.shape)
    # Central differences in float64 are exact to about 1e-9.
    step = 1e-5 / np.linalg.norm(direction)
    up, down = (
      sum(losses({**params, key: value + sign * step * direction}))
      for sign in (1, -1)
    )
    slopes[key] = direction, (up - down) / (2 * step)
  states: dict[str, np.ndarray] = {}
  given = (batch.get(x) for x in ("inputs", "segments", "prefix"))
  logits = oracle.forward(config, params, *given, states)
  slopes = {x: y for x, y in slopes.items() if x not in states}
  return Case(config, params, batch, logits, losses(params), slopes, states)


def check(case: Case, result: ModelResult) -> None:
  """Compares logits and losses, and gradients along random directions."""
  assert relative_error(result.logits, case.logits) < 1e-5
  losses, exact = (result.loss, result.z_loss), case.losses
  if result.z_loss is None:
    losses, exact = result.loss, sum(exact)
  assert losses == pytest.approx(exact, rel=1e-5)
  assert result.gradients.keys() == case.params.keys()
  check_slopes(case, result)
  for name, counts in case.states.items():
    np.testing.assert_array_equal(result.gradients[name], counts, name)


def check_slopes(case: Case, result: ModelResult) -> None:
  """Compares gradients along random directions."""
  for name, (direction, slope) in case.slopes.items():
    gradient = result.gradients[name].astype(float)
    error = abs(np.sum(gradient * direction) - slope)
    # A difference of norm e changes the slope by e times a number near 1.
    # Without rotation, the gradient of k's bias is 0 except for rounding.
    assert error < 1e-5 * np.linalg.norm(gradient) + 1e-6, name
