# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes and parses transformers' config.json, for the classes of families.py.

A class computes a model exactly if parsing the config.json that is made for the
class gives the same model.
"""

import dataclasses
import logging
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args

from palm_mtf.config.data import Packing
from palm_mtf.config.layer_pattern import write_pattern
from palm_mtf.config.model import MAX_LAYERS, MAX_SIZE, ModelConfig
from palm_mtf.errors import UserError, did_you_mean, shorten
from palm_mtf.export.huggingface.families import (
  BY_ARCHITECTURE,
  FAMILIES,
  REFUSED,
)
from palm_mtf.export.huggingface.family import (
  GLOBAL,
  OTHER_SIZES,
  ROOTS,
  WINDOW,
  Family,
  get_factor,
)
from palm_mtf.export.huggingface.rotary_keys import (
  OUTSIDE,
  make_rotary_keys,
  parse_rotary,
)
from palm_mtf.export.huggingface.tensor_files import ORIGINAL
from palm_mtf.export.huggingface.values import (
  Json,
  is_same,
  parse_number,
  parse_size,
)
from palm_mtf.model_dir.foreign_files import read_json_object

_logger = logging.getLogger(__name__)

_MOST_NAMED = 10  # maximum number of keys named in a warning
# Key for settings that transformers lacks; transformers ignores the key.
_OWN = "palm_mtf"
_OWN_CHOICES = {
  "FINAL_NORM_SCALE": ("learned", "none"),
  "PACKING": get_args(Packing),
}
# Keys that must have these values. Otherwise the model has code from outside
# transformers, or other layers.
_CONSTANTS = {
  "auto_map": None,
  "is_causal": True,
  "per_layer_config": None,
  "pruned_heads": {},
  "rope_interleaved": False,
  "add_cross_attention": False,
  "is_encoder_decoder": False,
}
# Keys that exist if weights are quantized, which palm_mtf does not read.
_QUANTIZED = ("quantization_config", "compression_config")
# Keys that change no logits: they configure training, tokens, names, the order
# of sums, or other classes. A warning names any other key that is not read.
_HARMLESS = set(
  "architectures transformers_version _name_or_path dtype torch_dtype "
  "use_cache bos_token_id eos_token_id pad_token_id sep_token_id unk_token_id "
  "tokenizer_class initializer_range gradient_checkpointing is_decoder "
  "attention_dropout hidden_dropout classifier_dropout "
  "attn_pdrop embd_pdrop resid_pdrop output_attentions output_hidden_states "
  "return_dict return_dict_in_generate torchscript chunk_size_feed_forward "
  "id2label label2id num_labels problem_type task_specific_params "
  "attn_implementation _attn_implementation _attn_implementation_autoset "
  "reorder_and_upcast_attn pretraining_tp max_window_layers n_ctx "
  "summary_activation summary_first_dropout summary_last_dropout "
  "summary_proj_to_labels summary_type summary_use_proj model_type "
  "layer_types rope_parameters rope_scaling unsloth_version "
  "unsloth_fixed is_llama_config transformers.js_config model_max_length "
  "rotary scale_attn_weights cache_implementation sliding_window_pattern "
  "_sliding_window_pattern layer_switch order_of_interleaved_layers "
  "position_embedding_type use_embedding_sharing use_gated_activation "
  "use_parallel_block use_parallel_embedding router_aux_loss_coef "
  "output_router_logits".split()
)
# Fields that `_list_differences` skips: they change no result, weights.py
# converts them (rotary_pairs, final_norm_scale), or each layer's settings are
# compared (layers, variants).
_NOT_COMPARED = (
  *("activation_dtype", "logits_dtype", "output_fan_in", "remat"),
  *("rotary_pairs", "final_norm_scale", "layers", "variants"),
)
# {type of layers in transformers: name in VARIANTS}
_VARIANTS = {WINDOW: "window", GLOBAL: "global"}


def find_family(model: ModelConfig) -> Family:
  """Returns the first family that computes a model, or raises UserError."""
  if model.has_prefix:
    raise UserError(
      f"OBJECTIVE = {model.objective!r}: inputs attend to one another in both "
      "directions, in none of the architectures of transformers and llama.cpp "
      "that are known here; use --format=saved_model or --format=npz."
    )
  # {class: [(setting that differs, value in the model, value in the class)]}
  different = {}
  for family in FAMILIES:
    config = make_model_keys(family, model)
    try:
      again = _parse_model(config, family, {}, family.architecture)
    except UserError:  # the class cannot have these sizes; try the next
      continue
    different[family] = list(_list_differences(model, again))
    if not different[family]:
      return family
  nearest = min(different, key=lambda family: len(different[family]))
  given, theirs = (
    ", ".join(f"{name.upper()} = {values[i]!r}" for name, *values in found)
    for found in [different[nearest]]
    for i in range(2)
  )
  raise UserError(
    f"{given}: no architecture of transformers that is known here has this "
    f"block; a {nearest.architecture} has {theirs}; use --format=saved_model "
    "or --format=npz."
  )


def list_layers(model: ModelConfig) -> list[ModelConfig]:
  """Returns the settings of each layer."""
  found = {name: model.variant(name) for name in model.variants or ()}
  names = model.variant_names
  return [found[x] for x in names] if names else [model] * model.num_layers


def _list_differences(
  model: ModelConfig, other: ModelConfig
) -> Iterator[tuple[str, object, object]]:
  # Yields (field, value, value of `other`) for settings of a layer that differ.
  layers = zip(list_layers(model), list_layers(other), strict=True)
  pairs = [*dict.fromkeys(layers)]
  for field in (x.name for x in dataclasses.fields(model)):
    if field in _NOT_COMPARED:
      continue
    for pair in pairs:
      ours, theirs = values = [_value_of(x, field) for x in pair]
      if field in ROOTS:
        ours, theirs = (get_factor(x, field) for x in pair)
      if field == "biases":
        ours, theirs = (",".join(sorted(x.split(","))) for x in values)
      is_float = isinstance(ours, float) and isinstance(theirs, float)
      if not (math.isclose(ours, theirs) if is_float else ours == theirs):
        yield field, *values
        break


def _value_of(layer: ModelConfig, field: str) -> object:
  # Returns a setting of a layer; for experts, their width in place of D_FF.
  is_width = layer.mlp == "experts" and field in ("d_ff", "d_expert")
  return layer.expert_size if is_width else getattr(layer, field)


def make_config(
  model: ModelConfig,
  *,
  start_id: int | None,
  end_ids: Sequence[int],
  packing: str,
) -> dict[str, object]:
  """Returns the content of config.json.

  `start_id` is the id of the start token, if there is one, and `end_ids` are
  those of the tokens that end a text, [eod] first. The content includes the
  run's PACKING, so that `parse_config` can return it.

  Raises UserError if no class of transformers computes this model.
  """
  family = find_family(model)
  return {
    "architectures": [family.architecture],
    "model_type": family.model_type,
    **make_model_keys(family, model),
    "torch_dtype": "float32",
    "bos_token_id": start_id,
    "eos_token_id": end_ids[0] if len(end_ids) == 1 else [*end_ids],
    # Not 0, because transformers would mask the token 0 at the start of a text.
    "pad_token_id": end_ids[0],
    _OWN: {"FINAL_NORM_SCALE": model.final_norm_scale, "PACKING": packing},
  }


def make_model_keys(family: Family, model: ModelConfig) -> dict[str, Any]:
  """Returns the keys of config.json that describe a model."""
  config: dict[str, Any] = {
    key: getattr(model, field) for key, field in family.sizes.items()
  }
  if family.has_key_heads:
    config["num_key_value_heads"] = model.key_heads
  if family.has_key_heads and family.has_head_dim:
    config["head_dim"] = model.d_kv
  for key, choice in family.choices.items():
    own = getattr(model, choice.setting)
    names = [theirs for theirs, ours in choice.values.items() if ours == own]
    if names:
      config[key] = names[0]
  for key, number in family.numbers.items():
    config[key] = number.get(model)
  for key, (places, _) in family.biases.items():
    config[key] = set(places.split(",")) <= {*model.bias_places}
  layers = list_layers(model)
  if family.has_dense_layers:
    dense = [i for i, x in enumerate(layers) if x.mlp != "experts"]
    config |= {"mlp_only_layers": dense, "decoder_sparse_step": 1}
  by_type = {GLOBAL: model}
  if family.period is not None:
    types = [WINDOW if x.attention_window else GLOBAL for x in layers]
    config["layer_types"] = types
    # The first layer of each type stands for all of them.
    by_type = dict(zip(types[::-1], layers[::-1], strict=True))
  first = by_type.get(WINDOW, model)
  if family.window is not None:
    config["sliding_window"] = first.attention_window
  config |= make_rotary_keys(family, by_type)
  return {**config, **family.constants, "attention_dropout": 0.0}


class DescribedModel(NamedTuple):
  """A model that a config.json describes."""

  family: Family
  model: ModelConfig
  packing: str  # PACKING of the run that trained the model
  start_id: int | None  # id of the start token, if there is one
  is_own: bool  # whether an export of palm_mtf made the config.json


def read_config(folder: str) -> DescribedModel:
  """Returns the model that the config.json in a folder describes.

  Raises UserError if there is no such file, or `parse_config` fails.
  """
  path = os.path.join(folder, "config.json")
  return parse_config(
    read_json_object(path, "give the folder of a model of transformers"), path
  )


def parse_config(config: Json, what: str) -> DescribedModel:
  """Returns the model that a config.json describes.

  Raises UserError if palm_mtf cannot compute this model. The message begins
  with `what`, and names the first key with an unsupported value.
  """
  named = config.get("architectures")
  name = named[0] if isinstance(named, list) and len(named) == 1 else None
  if isinstance(name, str) and name in REFUSED:
    raise UserError(f"{what}: {name} is not computed here: {REFUSED[name]}.")
  if not isinstance(name, str) or name not in BY_ARCHITECTURE:
    hint = did_you_mean(name, BY_ARCHITECTURE) if isinstance(name, str) else ""
    raise UserError(
      f"{what}: architectures = {shorten(named)}{hint}: the models of palm_mtf "
      f"are {', '.join(BY_ARCHITECTURE)}."
    )
  family = BY_ARCHITECTURE[name]
  own = _parse_own_settings(config, what)
  model = _parse_model(config, family, own, what)
  _warn_of_unknown_keys(config, family, model, what)
  start_id = config.get("bos_token_id", family.start_id)
  ends = config.get("eos_token_id")
  ends = ends if isinstance(ends, list) else [ends]
  begins_with_eod = start_id is not None and start_id in ends
  packing = own.get("PACKING", "joined" if begins_with_eod else "packed")
  is_known = type(start_id) is int and 0 <= start_id < model.vocab_size
  start_id = start_id if is_known else None
  return DescribedModel(family, model, packing, start_id, bool(own))


def _warn_of_unknown_keys(
  config: Json, family: Family, model: ModelConfig, what: str
) -> None:
  known = {*_HARMLESS, *_CONSTANTS, *_QUANTIZED, *OUTSIDE, _OWN, "head_dim"}
  known |= {*make_model_keys(family, model), *_common_names(family)}
  known |= {y for x in family.choices.values() for y in x.other_names}
  if "use_sliding_window" in family.constants:
    known.add("sliding_window")
  unknown = [x for x in config if x not in known and config[x] is not None]
  if unknown:
    shown = ", ".join(map(shorten, sorted(unknown)[:_MOST_NAMED]))
    more = len(unknown) - _MOST_NAMED
    _logger.warning(
      f"{what}: palm_mtf does not know these keys of a {family.architecture}, "
      f"and ignores them: {shown}{f' and {more:,} more' if more > 0 else ''}."
    )


def _common_names(family: Family) -> dict[str, str]:
  """Returns {key: field} for other keys of sizes that `family` has."""
  known = {*family.sizes.values()}
  return {
    key: field
    for key, field in OTHER_SIZES.items()
    if key not in family.sizes and field in known
  }


def _parse_own_settings(config: Json, what: str) -> dict[str, str]:
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
  config: Json, family: Family, own: Mapping[str, str], what: str
) -> ModelConfig:
  try:
    settings = _parse_sizes(config, family)
    for key, value in family.settings.items():
      is_derived = callable(value)
      settings[key] = value(settings["d_model"]) if is_derived else value
    for key, choice in family.choices.items():
      settings[choice.setting] = _parse_choice(config, key, choice)
    for key, number in family.numbers.items():
      settings |= number.parse(parse_number(config, key, number.default))
    settings["biases"] = _parse_biases(config, family)
    settings |= _parse_layers(config, family, settings)
    if family.has_dense_layers:
      settings |= _parse_dense_layers(config, settings)
    if width := settings.pop("expert_size", None):
      is_same_width = settings.setdefault("d_ff", width) == width
      settings["d_expert"] = None if is_same_width else width
    # None stands for 1 / sqrt(size), which GGUF files have in float32.
    for field, size in ROOTS.items():
      value, root = settings.get(field, 0.0), settings[size] ** -0.5
      if math.isclose(value, root, rel_tol=1e-7):
        settings[field] = None
    model = ModelConfig(
      activation_dtype="auto",
      final_norm_scale=own.get("FINAL_NORM_SCALE", "learned"),
      **settings,
    )
  except UserError as error:
    raise UserError(f"{what}: {error}") from None
  constants = {
    **_CONSTANTS,
    **family.constants,
    "model_type": family.model_type,
  }
  for key in _QUANTIZED:
    if config.get(key) is not None:
      raise UserError(f"{what}: {key}: the weights are quantized; {ORIGINAL}.")
  # If a file also has the usual key of a size, its value must be the same.
  constants |= {
    key: getattr(model, field) for key, field in _common_names(family).items()
  }
  if not (family.has_key_heads and family.has_head_dim):
    constants["head_dim"] = model.d_kv
  if config.get("layer_types") is not None and family.period is None:
    constants["layer_types"] = ["full_attention"] * model.num_layers
  compared = [(key, config.get(key, x), x) for key, x in constants.items()]
  for key, value, ours in compared:
    if not is_same(value, ours):
      raise UserError(
        f"{what}: {key} = {shorten(value)}: palm_mtf computes only with "
        f"{shorten(ours)}."
      )
  return model


def _parse_sizes(config: Json, family: Family) -> dict[str, object]:
  """Returns sizes, and ATTENTION and NUM_KV_HEADS, by field of ModelConfig."""
  found: dict = {}
  keys = {field: key for key, field in family.sizes.items()}
  found["d_model"] = parse_size(config, keys["d_model"])
  others = {field: key for key, field in _common_names(family).items()}
  for field, key in keys.items():
    if key not in config and others.get(field) in config:
      key = others[field]
    # Without n_inner, MLPs of GPT-2 and GPT-J are 4 * d_model wide.
    null = 4 * found["d_model"] if key == "n_inner" else None
    most = MAX_LAYERS if field == "num_layers" else MAX_SIZE
    found[field] = parse_size(config, key, null=null, most=most)
  heads, width = found["num_heads"], found["d_model"]
  key_heads, d_kv = heads, width // heads
  if family.has_key_heads:
    key_heads = parse_size(
      config, "num_key_value_heads", family.key_heads, null=heads
    )
  if family.has_key_heads and family.has_head_dim:
    d_kv = parse_size(config, "head_dim", family.head_dim, null=d_kv)
  elif width % heads:
    raise UserError(
      f"{keys['num_heads']} = {heads}: it divides {keys['d_model']} = {width}."
    )
  if heads % key_heads:
    raise UserError(
      f"num_key_value_heads = {key_heads}: it divides {keys['num_heads']} = "
      f"{heads}."
    )
  attention = "multi_head" if key_heads == heads else "grouped_query"
  if family.has_key_heads and key_heads == 1:
    attention = "multi_query"
  is_grouped = attention == "grouped_query"
  return {
    **found,
    "d_kv": d_kv,
    "attention": attention,
    "num_kv_heads": key_heads if is_grouped else None,
  }


def _parse_choice(config: Json, key: str, choice) -> object:
  # Ignore other names that are null, as they may be in older configurations.
  names = [key] if key in config else []
  names += [x for x in choice.other_names if config.get(x) is not None]
  found = []
  for name in names:
    value = config[name]
    if not any(is_same(value, x) for x in choice.values):
      known = " or ".join(map(repr, choice.values))
      raise UserError(
        f"{name} = {shorten(value)}: palm_mtf computes only with {known}."
      )
    found += [y for x, y in choice.values.items() if is_same(value, x)]
  if len({*found}) > 1:
    raise UserError(f"{' and '.join(names)} contradict each other.")
  return found[0] if found else choice.values[choice.default]


def _parse_biases(config: Json, family: Family) -> str:
  places = [x for x in (family.settings.get("biases", ""),) if x]
  for key, (added, default) in family.biases.items():
    value = config.get(key, default)
    if not isinstance(value, bool):
      raise UserError(f"{key} = {shorten(value)}: give true or false.")
    places += [added] if value else []
  return ",".join(places)


def _parse_layers(
  config: Json, family: Family, sizes: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns the settings of windows and positions, by field of ModelConfig."""
  d_kv, num_layers = sizes["d_kv"], sizes["num_layers"]
  if family.period is None:
    found = parse_rotary(config, family, d_kv)
    window = config.get("sliding_window", family.window or None)
    if family.window is not None and window is not None:
      window = parse_size(config, "sliding_window", family.window)
      # A window of a whole sequence hides nothing.
      is_whole = window >= sizes["sequence_length"]
      found["attention_window"] = None if is_whole else window
    return found
  types = config.get("layer_types")
  if types is None:
    period = parse_size(config, "sliding_window_pattern", family.period)
    types = [WINDOW if i % period else GLOBAL for i in range(1, num_layers + 1)]
  is_list = isinstance(types, list) and len(types) == num_layers
  if not is_list or not all(x in (WINDOW, GLOBAL) for x in types):
    raise UserError(
      f"layer_types = {shorten(types)}: give {WINDOW!r} or {GLOBAL!r} for "
      f"each of the {num_layers} layers."
    )
  by_name = {
    _VARIANTS[kind]: _parse_layer_type(config, family, kind, d_kv)
    for kind in dict.fromkeys(types)
  }
  if len(by_name) == 1:
    return by_name.popitem()[1]
  defaults = {x.name: x.default for x in dataclasses.fields(ModelConfig)}
  first, second = (defaults | own for own in by_name.values())
  differ = {field for field in defaults if first[field] != second[field]}
  found = {x: y for x, y in first.items() if x not in differ}
  found = {x: y for x, y in found.items() if y != defaults[x]}
  found["layers"] = write_pattern([_VARIANTS[kind] for kind in types])
  found["variants"] = {
    name: {x.upper(): own[x] for x in own if x in differ}
    for name, own in by_name.items()
  }
  return found


def _parse_dense_layers(
  config: Json, settings: Mapping[str, Any]
) -> dict[str, Any]:
  """Returns LAYERS and VARIANTS of a model in which some layers are dense."""
  step = parse_size(config, "decoder_sparse_step", 1)
  dense = config.get("mlp_only_layers") or []
  if not isinstance(dense, list):
    raise UserError(f"mlp_only_layers = {shorten(dense)}: give a list.")
  kinds = [
    "dense" if i in dense or (i + 1) % step else "sparse"
    for i in range(settings["num_layers"])
  ]
  if "dense" not in kinds:
    return {}
  variants = {"dense": {"MLP": settings["expert_mlp"]}, "sparse": {}}
  return {
    "layers": write_pattern(kinds),
    "variants": {kind: variants[kind] for kind in kinds},
  }


def _parse_layer_type(
  config: Json, family: Family, kind: str, d_kv: int
) -> dict[str, Any]:
  """Returns the settings of the layers of one type."""
  found = {}
  if kind == WINDOW:
    size = parse_size(config, "sliding_window", family.window)
    found = {"attention_window": size}
  elif family.global_positions != "rotary":
    return {"positions": family.global_positions}
  return found | parse_rotary(config, family, d_kv, kind)
