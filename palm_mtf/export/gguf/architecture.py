# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models as architectures of llama.cpp: names, shapes and metadata.

  command-r   BLOCK = "parallel", NORM = "layer_norm"
  granite     BLOCK = "serial", NORM = "rms_norm"

Kernels are [outputs, inputs], and neighbouring numbers of a head are rotated,
in both.
"""

import re

from palm_mtf.config import PalmConfig
from palm_mtf.errors import UserError
from palm_mtf.export.gguf.file import Value
from palm_mtf.export.huggingface.config_json import (
  COHERE,
  GRANITE,
  NORM_EPSILON,
  ROTARY_BASE,
  architecture_of,
)
from palm_mtf.export.huggingface.weights import FINAL_NORM

_NAMES = {COHERE: "command-r", GRANITE: "granite"}
# llama.cpp takes a command-r of so many layers for one that normalizes q and k.
_LAYERS_OF_COMMAND_R_PLUS = 64
_IN_LAYER = {
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def gguf_architecture(model: PalmConfig) -> str:
  """Returns the architecture of llama.cpp that computes exactly this model.

  Raises:
    UserError: there is none.
  """
  name = _NAMES[architecture_of(model)]
  width = model.num_heads * model.d_kv
  if name == "command-r" and width != model.d_model:
    raise UserError(
      f"NUM_HEADS * D_KV = {width} and D_MODEL = {model.d_model}: a command-r "
      "of llama.cpp has the same of both; use another --format."
    )
  if name == "command-r" and model.num_layers >= _LAYERS_OF_COMMAND_R_PLUS:
    raise UserError(
      f"NUM_LAYERS = {model.num_layers}: llama.cpp takes a command-r of "
      f"{_LAYERS_OF_COMMAND_R_PLUS} layers or more for one with norms of q and "
      "k; use another --format."
    )
  return name


def gguf_name(name: str) -> str:
  """Returns the name in GGUF of a tensor of transformers."""
  if name == FINAL_NORM:
    return "output_norm.weight"
  match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.weight", name)
  if match:
    return f"blk.{match[1]}.{_IN_LAYER[match[2]]}.weight"
  return "token_embd.weight"


def model_metadata(model: PalmConfig) -> dict[str, Value]:
  """Returns the keys of a model that has an architecture in llama.cpp."""
  name = gguf_architecture(model)
  is_shared = model.attention == "multi_query"
  described: dict[str, Value] = {
    "context_length": model.sequence_length,
    "embedding_length": model.d_model,
    "feed_forward_length": model.d_ff,
    "block_count": model.num_layers,
    "vocab_size": model.vocab_size,
    "attention.head_count": model.num_heads,
    "attention.head_count_kv": 1 if is_shared else model.num_heads,
    "attention.key_length": model.d_kv,
    "attention.value_length": model.d_kv,
    "rope.dimension_count": model.d_kv,
    "rope.freq_base": ROTARY_BASE,
  }
  if name == "command-r":
    described["attention.layer_norm_epsilon"] = NORM_EPSILON
    described["logit_scale"] = model.d_model**-0.5
  else:
    described["attention.layer_norm_rms_epsilon"] = NORM_EPSILON
    described["logit_scale"] = model.d_model**0.5  # divides
    described["attention.scale"] = model.d_kv**-0.5
  return {
    "general.architecture": name,
    **{f"{name}.{key}": value for key, value in described.items()},
  }
