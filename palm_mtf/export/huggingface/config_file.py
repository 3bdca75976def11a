# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads config.json: the model must compute exactly what palm_mtf does."""

import math
import os
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from palm_mtf.config.data import PACKINGS
from palm_mtf.config.palm import MAX_SIZES, PalmConfig
from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.architecture import (
  COHERE,
  GRANITE,
  OWN,
  ROTARY_BASE,
  SETTINGS_OF,
  own_keys,
)
from palm_mtf.export.huggingface.json_files import read_json_object, shown

# The values that our models have, of keys that these architectures may have.
# The key may also be left out.
_WANTED = {
  "hidden_act": "silu",
  "attention_bias": False,
  # Of quantized weights, of other code than that of transformers, and of layers
  # that transformers changes after it has loaded them.
  "quantization_config": None,
  "compression_config": None,
  "auto_map": None,
  "pruned_heads": {},
  "add_cross_attention": False,
  "is_encoder_decoder": False,
  "partial_rotary_factor": 1.0,
  "rope_theta": ROTARY_BASE,
}
# Of rope_parameters, and of rope_scaling, its name before transformers 5.
_WANTED_ROPE = {
  "rope_type": "default",
  "type": "default",
  "rope_theta": ROTARY_BASE,
  "partial_rotary_factor": 1.0,
}
# A key that is left out has the default of its class. Here are the defaults
# that palm_mtf does not have.
_DEFAULTS = {
  COHERE: {"layer_norm_eps": 1e-5, "logit_scale": 0.0625},
  GRANITE: {
    "logits_scaling": 1.0,
    "attention_multiplier": 1.0,
    "tie_word_embeddings": False,
  },
}
_OWN_CHOICES = {
  "FINAL_NORM_SCALE": ("learned", "none"),
  "PACKING": PACKINGS,
}


class DescribedModel(NamedTuple):
  """A model that a config.json describes.

  Attributes:
    architecture: class of transformers.
    model: the architecture of palm_mtf.
    packing: PACKING of the run that trained it.
  """

  architecture: str
  model: PalmConfig
  packing: str


def read_config(folder: str) -> DescribedModel:
  """Returns the model that the config.json of a folder describes.

  Raises:
    UserError: there is no such file, or it describes a model that palm_mtf does
      not compute; names the first difference.
  """
  path = os.path.join(folder, "config.json")
  return described(
    read_json_object(path, "give the folder of a model of transformers"), path
  )


def described(config: Mapping[str, object], what: str) -> DescribedModel:
  """Returns the model that a config.json describes.

  Args:
    config: content of the file.
    what: noun phrase for messages.

  Raises:
    UserError: palm_mtf does not compute this model; names the first difference.
  """
  named = config.get("architectures")
  if not isinstance(named, list) or named not in [[x] for x in SETTINGS_OF]:
    raise UserError(
      f"{what}: architectures = {shown(named)}: the models of palm_mtf are "
      f"{' and '.join(SETTINGS_OF)}."
    )
  architecture = named[0]
  own = _own_settings(config, what)
  model = _model(config, architecture, own, what)
  for name, value, ours in _values(config, architecture, model, what):
    if not _is_same(value, ours):
      raise UserError(
        f"{what}: {name} = {shown(value)}: palm_mtf computes only with "
        f"{ours!r}."
      )
  begins_with_eod = "bos_token_id" in config and config[
    "bos_token_id"
  ] == config.get("eos_token_id")
  packing = own.get("PACKING", "joined" if begins_with_eod else "packed")
  return DescribedModel(architecture, model, packing)


def _own_settings(config: Mapping[str, object], what: str) -> dict[str, str]:
  """Returns our settings that are no part of an architecture, by macro."""
  found = config.get(OWN)
  if found is None:
    return {}
  if not isinstance(found, dict) or found.keys() - _OWN_CHOICES.keys():
    raise UserError(
      f"{what}: {OWN} = {shown(found)}: only {' and '.join(_OWN_CHOICES)} are "
      "known there; another version wrote it."
    )
  for name, value in found.items():
    if value not in _OWN_CHOICES[name]:
      raise UserError(
        f"{what}: {OWN}: {name} = {shown(value)}: it is one of "
        f"{', '.join(map(repr, _OWN_CHOICES[name]))}; another version wrote it."
      )
  return found


def _model(
  config: Mapping[str, object],
  architecture: str,
  own: Mapping[str, str],
  what: str,
) -> PalmConfig:
  def size(name: str, field: str, default: int | None = None) -> int:
    value, most = config.get(name), MAX_SIZES[field]
    value = default if value is None else value
    if type(value) is not int or not 1 <= value <= most:
      raise UserError(
        f"{name} = {shown(value)}: give a whole number from 1 to {most:,}."
      )
    return value

  block, norm = SETTINGS_OF[architecture]
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


def _values(
  config: Mapping[str, object],
  architecture: str,
  model: PalmConfig,
  what: str,
) -> Iterator[tuple[str, object, object]]:
  """Yields name, value and our value of each key that a result depends on."""
  wanted = own_keys(architecture, model.d_model, model.d_kv)
  wanted |= {**_WANTED, "tie_word_embeddings": True}
  defaults = _DEFAULTS[architecture]
  for name, ours in wanted.items():
    yield name, config.get(name, defaults.get(name, ours)), ours
  for name in ("rope_parameters", "rope_scaling"):
    table = config.get(name)
    if table is None:
      continue
    if not isinstance(table, dict):
      raise UserError(f"{what}: {name} = {shown(table)}: is no JSON object.")
    for key, value in table.items():
      yield f"{name}: {shown(key)}", value, _WANTED_ROPE.get(key)


def _is_same(value: object, ours: object) -> bool:
  if isinstance(ours, float):
    # An integer may be too large for a float.
    is_number = type(value) is float or (
      type(value) is int and abs(value) < 2**53
    )
    return is_number and math.isclose(value, ours, rel_tol=1e-6)
  return type(value) is type(ours) and value == ours
