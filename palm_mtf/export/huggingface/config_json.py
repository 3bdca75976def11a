# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""config.json, for classes of transformers that compute exactly our model.

  CohereForCausalLM    BLOCK = "parallel", NORM = "layer_norm"
  GraniteForCausalLM   BLOCK = "serial", NORM = "rms_norm"

Both have SwiGLU, tied and rotary embeddings, any number of key and value heads,
and no biases. PaLM multiplies logits by 1/sqrt(d_model), which is Cohere's
logit_scale, and the inverse of Granite's logits_scaling.
"""

import math
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple, get_args

from palm_mtf.config.data import Packing
from palm_mtf.config.palm import MAX_LAYERS, MAX_SIZE, PalmConfig
from palm_mtf.errors import UserError, shorten
from palm_mtf.model_dir.foreign_files import read_json_object

COHERE, GRANITE = "CohereForCausalLM", "GraniteForCausalLM"
_BY_SETTINGS = {
  ("parallel", "layer_norm"): COHERE,
  ("serial", "rms_norm"): GRANITE,
}
_SETTINGS_OF = {name: pair for pair, name in _BY_SETTINGS.items()}
NORM_EPSILON, ROTARY_BASE = 1e-6, 10_000.0
# Key for settings that transformers lacks; transformers ignores the key.
_OWN = "palm_mtf"
_OWN_CHOICES = {
  "FINAL_NORM_SCALE": ("learned", "none"),
  "PACKING": get_args(Packing),
}
# Optional keys of config.json, with the value that our models have.
_WANTED = {
  "hidden_act": "silu",
  "attention_bias": False,
  "rope_theta": ROTARY_BASE,
  # If one of the next five keys has another value, the model has quantized
  # weights, code from outside transformers, or other layers.
  "quantization_config": None,
  "compression_config": None,
  "auto_map": None,
  "pruned_heads": {},
  "add_cross_attention": False,
  "is_encoder_decoder": False,
  "partial_rotary_factor": 1.0,
  "tie_word_embeddings": True,
}
# Optional keys of rope_parameters (before transformers 5: rope_scaling).
_WANTED_ROPE = {
  "rope_type": "default",
  "type": "default",
  "rope_theta": ROTARY_BASE,
  "partial_rotary_factor": 1.0,
}
# {architecture: {key: value that transformers uses if config.json lacks the
# key}}. Only values that differ from palm_mtf's values are listed.
_DEFAULTS = {
  COHERE: {"layer_norm_eps": 1e-5, "logit_scale": 0.0625},
  GRANITE: {
    "logits_scaling": 1.0,
    "attention_multiplier": 1.0,
    "tie_word_embeddings": False,
  },
}


def find_architecture(model: PalmConfig) -> str:
  """Returns the transformers class of a model, or raises UserError."""
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


def make_config(
  model: PalmConfig, *, start_id: int, eod_id: int, packing: str
) -> dict[str, object]:
  """Returns the content of config.json.

  The model reads token `start_id` at position 0. The content includes the run's
  PACKING, so that `parse_config` can return it.

  Raises:
    UserError: if no class of transformers computes this model.
  """
  architecture = find_architecture(model)
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
    # transformers 5 reads this key instead of rope_theta.
    "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
    "torch_dtype": "float32",
    "bos_token_id": start_id,
    "eos_token_id": eod_id,
    # Not 0, because transformers would then mask a 0 at the start of a text.
    "pad_token_id": eod_id,
    _OWN: {"FINAL_NORM_SCALE": model.final_norm_scale, "PACKING": packing},
  }
  return config | _make_architecture_keys(
    architecture, model.d_model, model.d_kv
  )


def _make_architecture_keys(
  architecture: str, d_model: int, d_kv: int
) -> dict[str, object]:
  """Returns the content of config.json that is specific to an architecture."""
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


class DescribedModel(NamedTuple):
  """A model that a config.json describes."""

  architecture: str  # class of transformers
  model: PalmConfig
  packing: str  # PACKING of the run that trained the model


def read_config(folder: str) -> DescribedModel:
  """Returns the model that the config.json in a folder describes.

  Raises:
    UserError: if there is no such file, or `parse_config` fails.
  """
  path = os.path.join(folder, "config.json")
  return parse_config(
    read_json_object(path, "give the folder of a model of transformers"), path
  )


def parse_config(config: Mapping[str, object], what: str) -> DescribedModel:
  """Returns the model that a config.json describes.

  Raises:
    UserError: if palm_mtf cannot compute this model. The message begins with
      `what`, and names the first key with an unsupported value.
  """
  named = config.get("architectures")
  if not isinstance(named, list) or named not in [[x] for x in _SETTINGS_OF]:
    raise UserError(
      f"{what}: architectures = {shorten(named)}: the models of palm_mtf "
      f"are {' and '.join(_SETTINGS_OF)}."
    )
  architecture = named[0]
  own = _parse_own_settings(config, what)
  model = _parse_model(config, architecture, own, what)
  for name, value, ours in _list_compared_keys(
    config, architecture, model, what
  ):
    if not _is_same(value, ours):
      raise UserError(
        f"{what}: {name} = {shorten(value)}: palm_mtf computes only with "
        f"{ours!r}."
      )
  begins_with_eod = "bos_token_id" in config and config[
    "bos_token_id"
  ] == config.get("eos_token_id")
  packing = own.get("PACKING", "joined" if begins_with_eod else "packed")
  return DescribedModel(architecture, model, packing)


def _parse_own_settings(
  config: Mapping[str, object], what: str
) -> dict[str, str]:
  """Returns {macro: value} from the key _OWN, or {} without this key."""
  found = config.get(_OWN)
  if found is None:
    return {}
  if not isinstance(found, dict) or found.keys() - _OWN_CHOICES.keys():
    raise UserError(
      f"{what}: {_OWN} = {shorten(found)}: only "
      f"{' and '.join(_OWN_CHOICES)} are known there; another version wrote it."
    )
  for name, value in found.items():
    if value not in _OWN_CHOICES[name]:
      raise UserError(
        f"{what}: {_OWN}: {name} = {shorten(value)}: it is one of "
        f"{', '.join(map(repr, _OWN_CHOICES[name]))}; another version wrote it."
      )
  return found


def _parse_model(
  config: Mapping[str, object],
  architecture: str,
  own: Mapping[str, str],
  what: str,
) -> PalmConfig:
  def size(name: str, field: str, default: int | None = None) -> int:
    most = MAX_LAYERS if field == "num_layers" else MAX_SIZE
    value = config.get(name)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= most:
      raise UserError(
        f"{name} = {shorten(value)}: give a whole number from 1 to {most:,}."
      )
    return value

  block, norm = _SETTINGS_OF[architecture]
  try:
    width = size("hidden_size", "d_model")
    heads = size("num_attention_heads", "num_heads")
    key_heads = size("num_key_value_heads", "num_heads", heads)
    if key_heads not in (1, heads):
      raise UserError(
        f"num_key_value_heads = {key_heads}: keys and values have one head or "
        f"num_attention_heads = {heads} in palm_mtf."
      )
    return PalmConfig(
      num_layers=size("num_hidden_layers", "num_layers"),
      d_model=width,
      num_heads=heads,
      d_kv=size("head_dim", "d_kv", width // heads),
      d_ff=size("intermediate_size", "d_ff"),
      vocab_size=size("vocab_size", "vocab_size"),
      sequence_length=size("max_position_embeddings", "sequence_length"),
      norm=norm,
      block=block,
      attention="multi_query" if key_heads == 1 else "multi_head",
      activation_dtype="auto",
      final_norm_scale=own.get("FINAL_NORM_SCALE", "learned"),
    )
  except UserError as error:
    raise UserError(f"{what}: {error}") from None


def _list_compared_keys(
  config: Mapping[str, object], architecture: str, model: PalmConfig, what: str
) -> Iterator[tuple[str, object, object]]:
  """Yields (key, its value, our value) for keys that affect the results."""
  wanted = (
    _make_architecture_keys(architecture, model.d_model, model.d_kv) | _WANTED
  )
  defaults = _DEFAULTS[architecture]
  for name, ours in wanted.items():
    yield name, config.get(name, defaults.get(name, ours)), ours
  for name in ("rope_parameters", "rope_scaling"):
    table = config.get(name)
    if table is None:
      continue
    if not isinstance(table, dict):
      raise UserError(f"{what}: {name} = {shorten(table)}: is no JSON object.")
    for key, value in table.items():
      yield f"{name}: {shorten(key)}", value, _WANTED_ROPE.get(key)


def _is_same(value: object, ours: object) -> bool:
  if isinstance(ours, float):
    # A float may not represent an int of 2**53 or more exactly.
    is_number = type(value) is float or (
      type(value) is int and abs(value) < 2**53
    )
    return is_number and math.isclose(value, ours, rel_tol=1e-6)
  return type(value) is type(ours) and value == ours
