# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Keys of GGUF that describe a model, for the table in architectures.py."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from palm_mtf.architecture.block import NORMS
from palm_mtf.architecture.rotary import yarn_magnitude
from palm_mtf.config import ModelConfig
from palm_mtf.data.vocabulary.gguf_tokenizer import read_key
from palm_mtf.errors import UserError, check_choice, did_you_mean, shorten
from palm_mtf.export.gguf.architectures import (
  ARCHITECTURES,
  NAMES,
  GgufArchitecture,
)
from palm_mtf.export.huggingface.config_json import (
  find_family,
  list_layers,
  make_model_keys,
  parse_config,
)
from palm_mtf.export.huggingface.family import WINDOW, get_factor
from palm_mtf.export.huggingface.weights import DIVISORS

Value = bool | int | float | str | list
Metadata = Mapping[str, Any]

_EPSILONS = {
  "mean_square": "attention.layer_norm_rms_epsilon",
  "variance": "attention.layer_norm_epsilon",
}
# Keys that palm_mtf reads, besides those of an architecture and of its family.
# `_check_keys` refuses unknown keys.
_READ = set(
  "attention.head_count_kv attention.key_length attention.value_length "
  "rope.dimension_count rope.freq_base rope.scale_linear rope.scaling.type "
  "rope.scaling.factor rope.scaling.attn_factor "
  "rope.scaling.original_context_length".split()
)
# llama.cpp's rotary base for a file without rope.freq_base.
_ROTARY_BASE = 10_000.0
# YaRN's limits, in rotations per original context; llama.cpp has no others.
_BETAS = {"beta_fast": 32.0, "beta_slow": 1.0}
# {key of a feature that we do not compute: values that turn the feature off}
_CONSTANTS = {
  **{f"rope.scaling.yarn_{key}": (x,) for key, x in _BETAS.items()},
  "attention.sliding_window": (0,),
  "attn_logit_softcapping": (0.0,),
  "final_logit_softcapping": (0.0,),
  "expert_count": (0,),
  "expert_used_count": (0,),
  "attention.causal": (True,),
  "attention.max_alibi_bias": (0.0,),
  "attention.clamp_kqv": (0.0,),
  "residual_scale": (1.0,),
  "logit_scale": (1.0,),
  "embedding_scale": (1.0,),
  "pooling_type": (0,),
}
# {key that changes no logits, because a tensor's shape says the same or because
# nothing reads the key: type of its value}
_HARMLESS = {
  "vocab_size": int,
  "tensor_data_layout": str,
  "rope.scaling.finetuned": bool,
}
# Keys that may have one number per layer, as an array, instead of one number.
_BY_LAYER = set(
  "feed_forward_length attention.head_count attention.head_count_kv "
  "expert_used_count expert_feed_forward_length".split()
)
# Settings of Llama 3's rotary scaling. GGUF has no keys for them, so palm_mtf
# writes them as "palm_mtf.*". A file without such keys gets the values below,
# which are those of the published models.
_LENGTH = "original_max_position_embeddings"
_LLAMA3 = {_LENGTH: 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# llama.cpp expects q and k norms in a command-r with at least this many layers.
_LAYERS_OF_COMMAND_R_PLUS = 64
# llama.cpp takes a gemma3 with this many layers for Gemma 3 27B, whose
# SCORE_SCALE is not 1 / sqrt(D_KV).
_LAYERS_OF_GEMMA3_27B = 62
_MOST_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
_EXPERT_WIDTH, _NORMALIZES = "expert_feed_forward_length", "expert_weights_norm"
_WINDOW, _PERIOD = (
  "attention.sliding_window",
  "attention.sliding_window_pattern",
)
_WINDOW_BASE = "rope.freq_base_swa"


def find_gguf_architecture(model: ModelConfig) -> GgufArchitecture:
  """Returns llama.cpp's architecture for a model, or raises UserError."""
  family = find_family(model)
  found = [x for x in ARCHITECTURES if x.family is family]
  if not found:
    raise UserError(
      f"a {family.architecture}: llama.cpp has no such architecture; use "
      "another --format."
    )
  (own,) = found
  layers = dict.fromkeys(list_layers(model))
  for field, value in own.only.items():
    for given in (getattr(layer, field) for layer in layers):
      if sorted(str(given).split(",")) != sorted(str(value).split(",")):
        raise UserError(
          f"{field.upper()} = {given!r}: llama.cpp computes a {own.name} with "
          f"{value!r}; use another --format."
        )
  if (model.num_experts or 0) > _MOST_EXPERTS:
    raise UserError(
      f"NUM_EXPERTS = {model.num_experts}: llama.cpp computes at most "
      f"{_MOST_EXPERTS:,} experts; use another --format."
    )
  keys = make_model_keys(family, model)
  if family.period is None:
    if model.attention_window:
      raise UserError(
        f"ATTENTION_WINDOW = {model.attention_window}: a {own.name} of "
        "llama.cpp has no window; use another --format."
      )
  elif not _find_period(keys["layer_types"]):
    raise UserError(
      f"LAYERS = {model.layers!r}: llama.cpp computes only a {own.name} in "
      "which all layers except each n-th have a window; use another --format."
    )
  for layer in layers:
    # In a gemma3, llama.cpp applies ROTARY_SCALING only to layers without a
    # window.
    is_plain = family.window_base and layer.attention_window
    scaling = layer.rotary_scaling
    if scaling not in (("none",) if is_plain else own.scalings):
      raise UserError(
        f"ROTARY_SCALING = {scaling!r}: llama.cpp computes no {own.name} with "
        "this scaling; use another --format."
      )
  for name, value in (("slow", 1.0), ("fast", 32.0), ("truncate", True)):
    given = getattr(model, f"rotary_{name}")
    if model.rotary_scaling == "yarn" and given not in (None, value):
      raise UserError(
        f"ROTARY_{name.upper()} = {given}: llama.cpp computes YaRN only with "
        f"{value}; use another --format."
      )
  width = model.num_heads * model.d_kv
  if own.has_one_width and width != model.d_model:
    raise UserError(
      f"NUM_HEADS * D_KV = {width} and D_MODEL = {model.d_model}: a {own.name} "
      "of llama.cpp has the same of both; use another --format."
    )
  is_plus = model.num_layers >= _LAYERS_OF_COMMAND_R_PLUS
  if own.name == "command-r" and is_plus:
    raise UserError(
      f"NUM_LAYERS = {model.num_layers}: llama.cpp takes a command-r of "
      f"{_LAYERS_OF_COMMAND_R_PLUS} layers or more for one with norms of q and "
      "k; use another --format."
    )
  scale = get_factor(model, "score_scale")
  only = _find_scalar(
    model.num_layers, model.d_model, model.num_heads, model.d_kv
  )
  if own.name == "gemma3" and not math.isclose(scale, only**-0.5):
    raise UserError(
      f"SCORE_SCALE = {scale:g}: llama.cpp computes this gemma3 with "
      f"{only**-0.5:g}; use another --format."
    )
  return own


def _find_scalar(num_layers: int, width: int, heads: int, d_kv: int) -> int:
  """Returns the query_pre_attn_scalar that llama.cpp uses for a gemma3."""
  return width // heads if num_layers == _LAYERS_OF_GEMMA3_27B else d_kv


def _find_period(types: Any) -> int:
  """Returns n if all layers except every n-th have a window, and 0 otherwise.

  `types` is the value of layer_types in config.json.
  """
  has_window = [x == WINDOW for x in types]
  period = [*has_window, False].index(False) + 1
  expected = [i % period > 0 for i in range(1, len(types) + 1)]
  return period if any(has_window) and has_window == expected else 0


def make_model_metadata(
  model: ModelConfig, own: GgufArchitecture
) -> dict[str, Value]:
  """Returns {key of GGUF: value} that describe a model."""
  family = own.family
  described: dict[str, Value] = {
    key: getattr(model, field) for key, field in own.sizes.items()
  }
  if family.has_experts:
    described[_EXPERT_WIDTH] = model.expert_size
    described[_NORMALIZES] = model.router_normalizes
  described["vocab_size"] = model.vocab_size
  described["attention.head_count_kv"] = model.key_heads
  described["attention.key_length"] = model.d_kv
  described["attention.value_length"] = model.d_kv
  keys = make_model_keys(family, model)
  if family.rotary_base is not None:
    described["rope.dimension_count"] = model.rotary_size
    described["rope.freq_base"] = float(keys["rope_theta"])
  if family.period is not None:
    described[_WINDOW] = keys["sliding_window"]
    described[_PERIOD] = _find_period(keys["layer_types"])
  if family.window_base is not None:
    described[_WINDOW_BASE] = float(keys["rope_local_base_freq"])
  scaling, others = keys.get("rope_scaling", {"rope_type": "none"}), {}
  kind = scaling["rope_type"]
  if kind == "llama3":
    defaults = {"factor": 1.0, **_LLAMA3}
    others = {f"palm_mtf.{k}": type(x)(scaling[k]) for k, x in defaults.items()}
  elif kind != "none":
    described["rope.scaling.type"] = kind
    described["rope.scaling.factor"] = float(scaling["factor"])
  if kind == "yarn":
    for key in scaling.keys() & _BETAS.keys():
      described[f"rope.scaling.yarn_{key}"] = _BETAS[key]
    described["rope.scaling.original_context_length"] = scaling[_LENGTH]
    if "attention_factor" in scaling:
      magnitude = scaling["attention_factor"] / yarn_magnitude(
        scaling["factor"]
      )
      described["rope.scaling.attn_factor"] = magnitude
  described[_EPSILONS[NORMS[model.norm].statistic]] = model.norm_epsilon
  described |= {x: float(keys[theirs]) for x, theirs in own.numbers.items()}
  described |= {x: bool(keys[theirs]) for x, theirs in own.flags.items()}
  return {
    "general.architecture": own.name,
    **{f"{own.name}.{key}": value for key, value in described.items()},
    **others,
  }


def read_model_metadata(
  metadata: Metadata,
  shapes: Mapping[str, tuple[int, ...]],
  what: str,
  read: Callable[[str], np.ndarray] | None = None,
) -> tuple[GgufArchitecture, ModelConfig]:
  """Returns the architecture and the model that a GGUF file describes.

  Args:
    metadata: {key: value} of the file.
    shapes: {name: shape} of its tensors.
    what: names the file in messages.
    read: returns the tensor with a name. Without it, Llama 3's rotary scaling
      is not recognized.

  Raises:
    UserError: if palm_mtf cannot compute this model.
  """
  name = NAMES[DIVISORS]
  divisors = read(name) if read and name in shapes else None
  try:
    own = _find_named(metadata)
    metadata = _join_equal_layers(metadata, own)
    _check_keys(metadata, own)
    _check_normalizes(metadata, own)
    config = _make_config(metadata, shapes, own)
    config["rope_scaling"] = _make_scaling(metadata, own, divisors)
  except UserError as error:
    raise UserError(f"{what}: {error}") from None
  return own, parse_config(config, what).model


def _find_named(metadata: Metadata) -> GgufArchitecture:
  name = read_key(metadata, "general.architecture", str)
  known = dict.fromkeys(x.name for x in ARCHITECTURES)
  if name not in known:
    raise UserError(
      f"general.architecture = {shorten(name)}{did_you_mean(name, known)}: the "
      f"architectures that palm_mtf reads are {', '.join(known)}."
    )
  found = [x for x in ARCHITECTURES if x.name == name]
  has_experts = read_key(metadata, f"{name}.expert_count", int, 0) > 0
  fitting = [x for x in found if x.family.has_experts == has_experts]
  return [*fitting, *found][0]


def _join_equal_layers(metadata: Metadata, own: GgufArchitecture) -> Metadata:
  # Replaces an array of one number per layer by the number, if all are equal.
  joined, num_layers = {**metadata}, metadata.get(f"{own.name}.block_count")
  for key in (f"{own.name}.{part}" for part in _BY_LAYER):
    value = metadata.get(key)
    is_array = isinstance(value, list) and len(value) == num_layers
    if is_array and len({*value}) == 1:
      joined[key] = value[0]
  return joined


def _check_keys(metadata: Metadata, own: GgufArchitecture) -> None:
  # Raises UserError for keys and values that palm_mtf does not compute.
  parts = read_key(metadata, "split.count", int, 1)
  if parts > 1:
    raise UserError(
      f"split.count = {parts}: is one of several files of a model; join them "
      "with llama-gguf-split --merge."
    )
  known = {*own.sizes, *_EPSILONS.values(), *_READ, *own.numbers, *own.flags}
  known |= {_WINDOW, _PERIOD} if own.family.period else set()
  known |= {_WINDOW_BASE} if own.family.window_base else set()
  known |= {_EXPERT_WIDTH, _NORMALIZES} if own.family.has_experts else set()
  constants = {**_CONSTANTS, **_HARMLESS, **own.constants}
  for key, value in metadata.items():
    prefix, _, part = key.partition(".")
    if prefix != own.name or part in known:
      continue
    if part not in constants:
      raise UserError(
        f"{shorten(key)} = {shorten(value)}: palm_mtf does not know this key "
        f"of a {own.name}, which may change the model."
      )
    harmless = constants[part]
    is_kind = isinstance(harmless, type)
    found = read_key(metadata, key, harmless if is_kind else type(harmless[0]))
    if not is_kind and found not in harmless:
      raise UserError(
        f"{key} = {shorten(value)}: palm_mtf does not compute this."
      )


def _check_normalizes(metadata: Metadata, own: GgufArchitecture) -> None:
  # Raises UserError if the file's expert_weights_norm is not what llama.cpp
  # computes, because llama.cpp does not read this key.
  ours = own.only.get("router_normalizes")
  key = f"{own.name}.{_NORMALIZES}"
  if (value := read_key(metadata, key, bool, ours)) != ours:
    raise UserError(
      f"{key} = {value}: llama.cpp computes a {own.name} with {ours}, whatever "
      "this key says; import the model's folder of transformers."
    )


def _to_decimal(value: Any) -> Any:
  # Returns the number that was rounded to float32, such as 1e-05 for
  # 9.99999975e-06: the shortest decimal that rounds to `value`.
  return float(str(np.float32(value))) if type(value) is float else value


def _make_scaling(
  metadata: Metadata, own: GgufArchitecture, divisors: np.ndarray | None
) -> dict[str, object]:
  # Returns the value of config.json's key rope_scaling.
  def get(key: str, default: Any) -> Any:
    return _to_decimal(read_key(metadata, key, type(default), default))

  prefix = f"{own.name}.rope.scaling."
  kind = get(f"{prefix}type", "linear")
  kinds = [x for x in own.scalings if x != "llama3"]
  check_choice(f"{prefix}type", kind, kinds)
  factor = get(f"{own.name}.rope.scale_linear", 0.0)
  factor = get(f"{prefix}factor", factor) or 1.0
  magnitude = get(f"{prefix}attn_factor", 1.0)
  found: dict[str, object] = {"rope_type": "default"}
  if kind == "yarn":
    length = read_key(metadata, f"{own.name}.context_length", int)
    length = get(f"{prefix}original_context_length", length)
    found = {"rope_type": kind, "factor": factor, _LENGTH: length}
    found |= {
      k: x for k, x in _BETAS.items() if f"{prefix}yarn_{k}" in metadata
    }
  elif kind == "linear" and factor != 1:
    found = {"rope_type": kind, "factor": factor}
  elif divisors is not None and "llama3" in own.scalings:
    defaults = {"factor": float(divisors.max()), **_LLAMA3}
    found = {key: get(f"palm_mtf.{key}", x) for key, x in defaults.items()}
    found["rope_type"] = "llama3"
  if magnitude != 1:
    # llama.cpp multiplies the file's factor by YaRN's; attention_factor is this
    # product. Both factors are float32, so only seven digits are exact.
    magnitude *= yarn_magnitude(factor)
    found["attention_factor"] = float(f"{magnitude:.7g}")
  return found


def _find_only_choices(own: GgufArchitecture) -> dict[str, object]:
  # Returns {key of config.json: value}, for the keys with only one value that
  # llama.cpp computes.
  return {
    key: theirs
    for key, choice in own.family.choices.items()
    for theirs, ours in reversed(choice.values.items())
    if ours == own.only.get(choice.setting)
  }


def _make_config(
  metadata: Metadata,
  shapes: Mapping[str, tuple[int, ...]],
  own: GgufArchitecture,
) -> dict[str, object]:
  # Returns the config.json of the same model. It has all keys, because
  # llama.cpp and transformers have different defaults.
  def get(key: str, kind: type, *default: object) -> Any:
    value = read_key(metadata, f"{own.name}.{key}", kind, *default)
    if kind is not bool and not 0 < value < 2**53:
      raise UserError(f"{own.name}.{key} = {value}: give a number above 0.")
    return _to_decimal(value)

  def check(key: str, value: object, ours: object) -> None:
    if value != ours:
      raise UserError(
        f"{own.name}.{key} = {value}: palm_mtf computes only with {ours}."
      )

  family, embedding = own.family, shapes.get(NAMES["embedding"], ())
  if len(embedding) != 2:
    raise UserError(
      f"{NAMES['embedding']} is {embedding or 'missing'}; the model wants two "
      "dimensions; convert the model again."
    )
  keys = {field: key for key, field in family.sizes.items()}
  sizes = {field: get(key, int) for key, field in own.sizes.items()}
  if family.has_experts:
    # In a llama and an olmoe, all layers have experts, so `sizes` has only the
    # width of experts.
    default = sizes.get("d_ff", 0) // sizes["experts_per_token"]
    width = get(_EXPERT_WIDTH, int, sizes.get("expert_size", default))
    check(_EXPERT_WIDTH, width, sizes.setdefault("expert_size", width))
  config: dict[str, object] = {
    "architectures": [family.architecture],
    keys["vocab_size"]: embedding[0],
    **{keys[field]: size for field, size in sizes.items()},
    **_find_only_choices(own),
  }
  heads, width = sizes["num_heads"], sizes["d_model"]
  default = width // heads
  key_heads = get("attention.head_count_kv", int, heads)
  d_kv = get("attention.key_length", int, default)
  check(
    "attention.value_length", get("attention.value_length", int, default), d_kv
  )
  if family.has_key_heads:
    config["num_key_value_heads"], config["head_dim"] = key_heads, d_kv
  else:
    check("attention.head_count_kv", key_heads, heads)
    check("attention.key_length", d_kv, default)
  statistic = NORMS[str(family.settings["norm"])].statistic
  epsilon = next(x for x in family.numbers if "eps" in x)
  config[epsilon] = get(_EPSILONS[statistic], float)
  config |= {theirs: get(key, float) for key, theirs in own.numbers.items()}
  config |= {theirs: get(key, bool) for key, theirs in own.flags.items()}
  if family.rotary_base is not None:
    config["rope_theta"] = get("rope.freq_base", float, _ROTARY_BASE)
    size = get("rope.dimension_count", int, d_kv)
    if family.rotary_fraction is None:
      check("rope.dimension_count", size, d_kv)
    else:
      config["partial_rotary_factor"] = size / d_kv
  if family.period is not None:
    config["sliding_window"] = get(_WINDOW, int)
    config["sliding_window_pattern"] = get(_PERIOD, int, family.period)
  if family.window_base is not None:
    base = get(_WINDOW_BASE, float, family.window_base)
    config["rope_local_base_freq"] = base
  if own.name == "gemma3":
    scalar = _find_scalar(sizes["num_layers"], width, heads, d_kv)
    config["query_pre_attn_scalar"] = scalar
  layout = own.layout.names
  config["tie_word_embeddings"] = layout["output_embedding"] not in shapes
  first_of = {"qkv": "attention/q_bias", "o": "attention/o_bias"}
  for key, (places, _) in family.biases.items():
    first = first_of.get(places.split(",")[0], "mlp/wi_bias")
    config[key] = layout[first].format(0) in shapes
  return config
