# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Settings of blocks that tests try: those of known models, and mixed ones."""

import pytest

from palm_mtf.config import ModelConfig
from tests.mtf_testing import small_config

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

# {name: settings}. Together they have each value of each setting, and the mixed
# ones have the values that no known model combines.
SETTINGS = {
  "LLaMA": _LLAMA,
  "LLaMA 3": {**_LLAMA, **_GQA, "rotary_base": 5e5},
  "Mistral": {**_LLAMA, **_GQA, "attention_window": 3},
  "Qwen 3": {**_LLAMA, **_GQA, "qk_norm": "rms_norm"},
  "Gemma": dict(
    block="serial",
    norm="rms_norm_1p",
    mlp="geglu_tanh",
    embedding_scale=24**0.5,
    logits_scale=1.0,
  ),
  "GPT-2": _GPT2,
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
}


def fast_only(*names: str) -> list:
  """Returns all names of SETTINGS as parameters of a test; others are slow."""
  return [
    name if name in names else pytest.param(name, marks=pytest.mark.slow)
    for name in SETTINGS
  ]


def block_config(name: str, **changes: object) -> ModelConfig:
  """Returns a small model with the settings of a name."""
  return small_config(**{**SETTINGS[name], **changes})
