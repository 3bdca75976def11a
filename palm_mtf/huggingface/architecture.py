# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The config.json of a model: which architectures are exactly ours.

  CohereForCausalLM    BLOCK = "parallel", NORM = "layer_norm"
  GraniteForCausalLM   BLOCK = "serial", NORM = "rms_norm"

Both have bias-free products, SwiGLU, a tied embedding, rotary embedding and
any number of key and value heads. Cohere multiplies logits by logit_scale,
Granite divides them by logits_scaling: 1/sqrt(d_model) of PaLM 2.
"""

import json
import math
import os
from collections.abc import Mapping

from palm_mtf.config.model import PalmConfig
from palm_mtf.errors import UserError

COHERE, GRANITE = "CohereForCausalLM", "GraniteForCausalLM"
_BY_SETTINGS = {
  ("parallel", "layer_norm"): COHERE,
  ("serial", "rms_norm"): GRANITE,
}
_SETTINGS_OF = {name: pair for pair, name in _BY_SETTINGS.items()}
NORM_EPSILON, ROTARY_BASE = 1e-6, 10_000.0
# Our settings that are no part of these architectures. A key of our own keeps
# them, which transformers leaves alone.
_OWN = "palm_mtf"


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
    _OWN: {"FINAL_NORM_SCALE": model.final_norm_scale, "PACKING": packing},
  }
  return config | _own_keys(architecture, model.d_model, model.d_kv)


def _own_keys(architecture: str, d_model: int, d_kv: int) -> dict[str, object]:
  """Returns what the config.json of one architecture alone has."""
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


def read_config(folder: str) -> Mapping[str, object]:
  """Returns the config.json of a folder.

  Raises:
    UserError: there is none, or it is no JSON object.
  """
  path = os.path.join(folder, "config.json")
  try:
    with open(path, encoding="utf-8") as file:
      config = json.load(file)
  except OSError as error:
    raise UserError(
      f"{path}: {error.strerror}; give the folder of a model of transformers."
    ) from None
  except ValueError:
    config = None
  if not isinstance(config, dict):
    raise UserError(f"{path}: is no JSON object; copy it again.")
  return config


def from_config(
  config: Mapping[str, object], what: str
) -> tuple[PalmConfig, str]:
  """Returns the architecture and PACKING that a config.json says.

  Args:
    config: config.json.
    what: noun phrase for messages.

  Raises:
    UserError: it is of another model than ours; names the first difference.
  """
  named = config.get("architectures")
  architecture = named[0] if isinstance(named, list) and named else None
  if architecture not in _SETTINGS_OF:
    raise UserError(
      f"{what}: is a {architecture}; {' and '.join(_SETTINGS_OF)} are models "
      "of palm_mtf."
    )
  own = _table(config, _OWN)
  begins_with_eod = config.get("bos_token_id") == config.get("eos_token_id")
  block, norm = _SETTINGS_OF[architecture]
  heads = config.get("num_attention_heads")
  key_heads = config.get("num_key_value_heads", heads)
  is_shared = key_heads == 1
  if not is_shared and key_heads != heads:
    raise UserError(
      f"{what}: num_key_value_heads = {key_heads!r}: keys and values have one "
      f"head or num_attention_heads = {heads!r} in palm_mtf."
    )
  width = config.get("hidden_size")
  try:
    model = PalmConfig(
      num_layers=config["num_hidden_layers"],
      d_model=width,
      num_heads=heads,
      d_kv=config.get("head_dim") or width // heads,
      d_ff=config["intermediate_size"],
      vocab_size=config["vocab_size"],
      sequence_length=config["max_position_embeddings"],
      norm=norm,
      block=block,
      attention="multi_query" if is_shared else "multi_head",
      activation_dtype="auto",
      final_norm_scale=own.get("FINAL_NORM_SCALE", "learned"),
    )
  except (KeyError, TypeError) as error:
    raise UserError(f"{what}: config.json lacks {error}.") from None
  _check_numbers(config, architecture, model, what)
  return model, own.get("PACKING", "joined" if begins_with_eod else "packed")


def _check_numbers(
  config: Mapping[str, object],
  architecture: str,
  model: PalmConfig,
  what: str,
) -> None:
  """Raises UserError where a number is not the one that palm_mtf computes."""
  wanted = _own_keys(architecture, model.d_model, model.d_kv)
  wanted |= {
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
  }
  # What a config.json leaves out has the default of its class.
  defaults = {"layer_norm_eps": 1e-5, "logit_scale": 0.0625}
  if architecture == GRANITE:
    defaults = {"logits_scaling": 1.0, "attention_multiplier": 1.0}
    defaults["tie_word_embeddings"] = False
  rope = _table(config, "rope_parameters")
  theta = config.get("rope_theta", rope.get("rope_theta"))
  kind = rope.get("rope_type") or (config.get("rope_scaling") and "scaled")
  pairs = [
    (name, config.get(name, defaults.get(name, value)), value)
    for name, value in wanted.items()
  ]
  pairs += [
    ("rope_theta", theta, ROTARY_BASE),
    ("rope_type", kind or "default", "default"),
  ]
  for name, value, ours in pairs:
    is_number = isinstance(ours, float) and isinstance(value, (int, float))
    if not (
      math.isclose(value, ours, rel_tol=1e-6) if is_number else value == ours
    ):
      raise UserError(
        f"{what}: {name} = {value!r}: palm_mtf computes with {ours!r} alone."
      )


def _table(config: Mapping[str, object], name: str) -> Mapping[str, object]:
  """Returns a table within config.json, empty where there is none."""
  found = config.get(name)
  return found if isinstance(found, dict) else {}
