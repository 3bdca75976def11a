# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json of a model: which architectures are exactly ours.

  CohereForCausalLM    BLOCK = "parallel", NORM = "layer_norm"
  GraniteForCausalLM   BLOCK = "serial", NORM = "rms_norm"

Both have bias-free products, SwiGLU, a tied embedding, rotary embedding and
any number of key and value heads. Cohere multiplies logits by logit_scale,
Granite divides them by logits_scaling: 1/sqrt(d_model) of PaLM 2.
"""

from palm_mtf.config import PalmConfig
from palm_mtf.errors import UserError

COHERE, GRANITE = "CohereForCausalLM", "GraniteForCausalLM"
_BY_SETTINGS = {
  ("parallel", "layer_norm"): COHERE,
  ("serial", "rms_norm"): GRANITE,
}
SETTINGS_OF = {name: pair for pair, name in _BY_SETTINGS.items()}
NORM_EPSILON, ROTARY_BASE = 1e-6, 10_000.0
# Key of config.json for our settings that are no part of these architectures.
# transformers ignores the key.
OWN = "palm_mtf"


def architecture_of(model: PalmConfig) -> str:
  """Returns the class of transformers that computes exactly this model.

  Raises:
    UserError: there is none.
  """
  if model.has_prefix:
    raise UserError(
      f"OBJECTIVE = {model.objective!r}: inputs attend to one another in both "
      "directions, in none of the architectures of transformers and llama.cpp "
      "that are known here; use --format=saved_model or --format=npz."
    )
  found = _BY_SETTINGS.get((model.block, model.norm))
  if found:
    return found
  fixes = " or ".join(
    f'NORM = "{norm}" with BLOCK = "{block}"' for block, norm in _BY_SETTINGS
  )
  raise UserError(
    f"NORM = {model.norm!r}: no architecture of transformers has it in a "
    f"{model.block} block; a model can be exported that was trained with "
    f"{fixes}."
  )


def to_config(
  model: PalmConfig, *, start_id: int, eod_id: int, packing: str
) -> dict[str, object]:
  """Returns config.json.

  Args:
    model: the architecture.
    start_id: input before the first token of a text.
    eod_id: id of [eod].
    packing: PACKING of the run, for `from_config`.

  Raises:
    UserError: no architecture of transformers is this model.
  """
  architecture = architecture_of(model)
  is_shared = model.attention == "multi_query"
  config = {
    "architectures": [architecture],
    "vocab_size": model.vocab_size,
    "hidden_size": model.d_model,
    "intermediate_size": model.d_ff,
    "num_hidden_layers": model.num_layers,
    "num_attention_heads": model.num_heads,
    "num_key_value_heads": 1 if is_shared else model.num_heads,
    "head_dim": model.d_kv,
    "hidden_act": "silu",
    "max_position_embeddings": model.sequence_length,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": True,
    "rope_theta": ROTARY_BASE,
    # By two names: transformers 5 reads the second.
    "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
    "torch_dtype": "float32",
    "bos_token_id": start_id,
    "eos_token_id": eod_id,
    # Not 0: where it begins a text, transformers would mask it.
    "pad_token_id": eod_id,
    OWN: {"FINAL_NORM_SCALE": model.final_norm_scale, "PACKING": packing},
  }
  return config | own_keys(architecture, model.d_model, model.d_kv)


def own_keys(architecture: str, d_model: int, d_kv: int) -> dict[str, object]:
  """Returns the keys of config.json that only one architecture has."""
  if architecture == COHERE:
    return {
      "model_type": "cohere",
      "layer_norm_eps": NORM_EPSILON,
      "logit_scale": d_model**-0.5,
      "use_qk_norm": False,
    }
  return {
    "model_type": "granite",
    "rms_norm_eps": NORM_EPSILON,
    "logits_scaling": d_model**0.5,
    "attention_multiplier": d_kv**-0.5,
    "embedding_multiplier": 1.0,
    "residual_multiplier": 1.0,
    "mlp_bias": False,
  }
