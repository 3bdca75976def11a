# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of config.json that describe rotary embedding."""

from collections.abc import Mapping
from typing import Any

from palm_mtf.architecture.rotary import yarn_magnitude
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError, check_choice, did_you_mean, shorten
from palm_mtf.export.huggingface.family import GLOBAL, WINDOW, Family
from palm_mtf.export.huggingface.values import (
  Json,
  is_same,
  parse_number,
  parse_size,
)

# Key, before transformers 5, of the rotary base of layers with a window.
_WINDOW_BASE = "rope_local_base_freq"
# In rope_parameters (before transformers 5: rope_scaling), a key of _ROPE_TYPES
# names the kind of rotary scaling. The other tables are {key: field of Rotary},
# for all kinds (_ROTARY) and for each kind (_SCALINGS).
_ROPE_TYPES = ("rope_type", "type")
_ROTARY = {
  **dict.fromkeys(("rope_theta", "rotary_emb_base"), "base"),
  **dict.fromkeys(("partial_rotary_factor", "rotary_pct"), "fraction"),
}
_LENGTH = "original_max_position_embeddings"
_BY_TURNS = {"factor": "factor", _LENGTH: "original_length"}
_YARN = {  # keys that a file may lack
  **{"beta_slow": "slow", "beta_fast": "fast", "truncate": "truncate"},
  **{x: x for x in ("attention_factor", "mscale", "mscale_all_dim")},
}
_SCALINGS = {
  "default": {},
  "linear": {"factor": "factor"},
  "llama3": {
    **_BY_TURNS,
    "low_freq_factor": "slow",
    "high_freq_factor": "fast",
  },
  "yarn": {**_BY_TURNS, **_YARN},
}
# Keys of rope_parameters that may instead be at the top level of config.json.
OUTSIDE = (*_ROTARY, _LENGTH)


def make_rotary_keys(
  family: Family, by_type: Mapping[str, ModelConfig]
) -> dict[str, Any]:
  """Returns the keys for layers of each type, {type: settings}."""
  types = (WINDOW, GLOBAL) if family.window_base is None else (GLOBAL, WINDOW)
  model = next(by_type[kind] for kind in types if kind in by_type)
  if family.rotary_size:
    return {family.rotary_size[0]: model.rotary_size}
  if family.rotary_base is None:
    return {}
  # transformers 5 reads rope_parameters; earlier versions, the other keys.
  rope = _make_table(family, model)
  outside = {key: x for key, x in rope.items() if key in _ROTARY}
  config = {"rope_parameters": rope, **outside}
  config |= {old: rope[new] for old, new in family.older_names.items()}
  if model.rotary_scaling != "none":
    config["rope_scaling"] = {
      key: x for key, x in rope.items() if key not in _ROTARY
    }
  if family.window_base is not None:
    config["rope_parameters"] = {
      kind: _make_table(family, x) for kind, x in by_type.items()
    }
    if WINDOW in by_type:
      config[_WINDOW_BASE] = by_type[WINDOW].rotary_base
  return config


def _make_table(family: Family, model: ModelConfig) -> dict[str, Any]:
  # Returns the value of rope_parameters.
  kind = "default" if model.rotary_scaling == "none" else model.rotary_scaling
  found: dict[str, Any] = {"rope_type": kind}
  for key, name in _SCALINGS[kind].items():
    value = getattr(model, f"rotary_{name}", None)
    # Omit `truncate` = true, the default, which older transformers do not know.
    if value is not None and value is not True:
      found[key] = value
  found["rope_theta"] = model.rotary_base
  if family.rotary_fraction is not None:
    found["partial_rotary_factor"] = model.rotary_fraction
  return found


def parse_rotary(
  config: Json, family: Family, d_kv: int, layer_type: str = GLOBAL
) -> dict[str, object]:
  """Returns settings of rotary embedding in layers of one type, by field.

  Raises:
    UserError: palm_mtf cannot compute this rotary embedding.
  """
  if family.settings.get("positions", "rotary") != "rotary":
    return {}
  if family.rotary_size:
    size = parse_size(config, *family.rotary_size)
    return {"rotary_fraction": size / d_kv}
  base = family.rotary_base
  if family.window_base is not None:
    config = _select_table(config, layer_type)
    base = family.window_base if layer_type == WINDOW else base
  found: dict = {}

  def keep(name: str, key: str, value: object) -> None:
    if not is_same(value, found.setdefault(name, value)):
      raise UserError(
        f"{key} = {shorten(value)}: another key says {found[name]!r}."
      )

  tables = {x: config.get(x) for x in ("rope_parameters", "rope_scaling")}
  tables = {x: keys for x, keys in tables.items() if keys is not None}
  for table, keys in tables.items():
    if not isinstance(keys, dict):
      raise UserError(f"{table} = {shorten(keys)}: is no JSON object.")
    for key in [x for x in _ROPE_TYPES if x in keys]:
      check_choice(f"{table}: {key}", keys[key], _SCALINGS)
      keep("scaling", f"{table}: {key}", keys[key])
  kind = found.setdefault("scaling", "default")
  known = {**_ROTARY, **_SCALINGS[kind]}
  outside = {x: config[x] for x in OUTSIDE if x in known and x in config}
  for table, keys in (*tables.items(), ("", outside)):
    for key, value in keys.items():
      if key in known:
        if value is not None or key in (*_ROTARY, "truncate"):
          keep(known[key], key, _parse_rotary_key(keys, key, known[key]))
      elif key not in _ROPE_TYPES:
        raise UserError(
          f"{table}: {shorten(key)} = {shorten(value)}"
          f"{did_you_mean(key, known)}: palm_mtf does not compute this with "
          f"rope_type = {kind!r}."
        )
  for key, name in _SCALINGS[kind].items():
    if name not in found and key not in _YARN:
      raise UserError(f"rope_type = {kind!r}: wants {key}.")
  fraction = found.get("fraction", family.rotary_fraction or 1.0)
  if family.rotary_fraction is None and fraction != 1:
    raise UserError(
      f"partial_rotary_factor = {fraction}: palm_mtf computes only with 1.0."
    )
  weights = [found.pop(x, None) for x in ("mscale", "mscale_all_dim")]
  if all(weights) and "attention_factor" not in found:
    above, below = (yarn_magnitude(found["factor"], x) for x in weights)
    found["attention_factor"] = above / below
  # transformers rounds the number of rotated dimensions down.
  share = 1.0 if fraction == 1 else int(fraction * d_kv) / d_kv
  scaling = "none" if kind == "default" else kind
  found = {"base": base, **found, "scaling": scaling}
  return {f"rotary_{x}": y for x, y in {**found, "fraction": share}.items()}


def _parse_rotary_key(keys: Json, key: str, name: str) -> object:
  if name == "original_length":
    return parse_size(keys, key)
  if name == "truncate":
    if not isinstance(keys[key], bool):
      raise UserError(f"{key} = {shorten(keys[key])}: give true or false.")
    return keys[key]
  return parse_number(keys, key, 1.0)


def _select_table(config: Json, layer_type: str) -> dict[str, object]:
  # Returns config.json with only one type's keys of rotary embedding, of a
  # class that has them for each type of layers.
  tables = config.get("rope_parameters")
  tables = {} if tables is None else tables
  if not isinstance(tables, dict) or tables.keys() - {WINDOW, GLOBAL}:
    raise UserError(
      f"rope_parameters = {shorten(tables)}: give a table for {WINDOW!r} and "
      f"for {GLOBAL!r}."
    )
  found = {**config, "rope_parameters": tables.get(layer_type)}
  if layer_type == WINDOW:
    for key in ("rope_scaling", "rope_theta"):
      found.pop(key, None)
    if _WINDOW_BASE in config:
      found["rope_theta"] = config[_WINDOW_BASE]
  return found
