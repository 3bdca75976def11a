# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A class of Hugging Face transformers as data: settings, keys and names.

families.py describes each class as a `Family`.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from palm_mtf.config import ModelConfig

# Values of layer_types for layers with a window and without.
WINDOW, GLOBAL = "sliding_attention", "full_attention"
# {key of config.json for a size: field of ModelConfig}
SIZES = {
  "vocab_size": "vocab_size",
  "hidden_size": "d_model",
  "intermediate_size": "d_ff",
  "num_hidden_layers": "num_layers",
  "num_attention_heads": "num_heads",
  "max_position_embeddings": "sequence_length",
}
EXPERT_SIZES = {
  "num_experts": "num_experts",
  "num_experts_per_tok": "experts_per_token",
}
# Other names of these keys, in configurations of other versions or classes.
OTHER_SIZES = {"num_local_experts": "num_experts", **SIZES, **EXPERT_SIZES}


class Choice(NamedTuple):
  """A key of config.json whose values stand for values of a setting."""

  setting: str  # field of ModelConfig
  values: Mapping[object, object]  # {value of the key: value of the setting}
  default: object  # value that transformers uses without the key
  other_names: tuple[str, ...] = ()  # names of the key in older configurations


class Number(NamedTuple):
  """A key of config.json that holds a setting's value, a number."""

  field: str  # field of ModelConfig
  # Value that transformers uses without the key; an int for a key that must
  # hold a whole number.
  default: float
  power: int = 1  # the key holds the setting to this power

  def get(self, model: ModelConfig) -> float:
    """Returns the value of the key for a model."""
    value = get_factor(model, self.field) ** self.power
    return round(value) if isinstance(self.default, int) else value

  def parse(self, value: float) -> dict[str, float]:
    """Returns the setting, {field: value}, for the value of the key."""
    return {self.field: value ** (1 / self.power)}


# {setting: size n}. None as the value of the setting means 1 / sqrt(n).
ROOTS = {"logits_scale": "d_model", "score_scale": "d_kv"}


def get_factor(model: ModelConfig, field: str) -> float:
  """Returns a setting that is a number, with None replaced by its meaning."""
  value = getattr(model, field)
  return getattr(model, ROOTS[field]) ** -0.5 if value is None else value


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Family:
  """One class of transformers.

  Attributes:
    architecture: the class, such as "LlamaForCausalLM".
    model_type: value of the key model_type.
    start_id: default of the key bos_token_id; None for no start token.
    settings: {field of ModelConfig: its value in all models of the class, or
      a function from D_MODEL to the value}.
    sizes: {key: field of ModelConfig, or its property expert_size}.
    has_key_heads: whether the keys num_key_value_heads and head_dim exist;
      otherwise attention is multi-head, with d_kv = d_model / num_heads.
    has_head_dim: whether the key head_dim exists, besides num_key_value_heads.
    has_dense_layers: whether the keys mlp_only_layers and decoder_sparse_step
      exist, which say which layers have no experts.
    key_heads, head_dim: defaults of these two keys. None stands for num_heads
      and for d_model / num_heads.
    choices: {key that chooses the value of a setting: its `Choice`}.
    numbers: {key that holds a number: its `Number`}.
    biases: {key: (places of BIASES that a true value adds, default)}; {} if the
      class has no such key.
    window: default of the key sliding_window, or 0 if by default there is no
      window; None if the class lacks the key.
    period: default of sliding_window_pattern, for a class in which all layers
      except every `period`-th have the window; None if its layers are alike.
    global_positions: POSITIONS of the layers without a window.
    window_base: default of ROTARY_BASE in the layers with a window, if these
      have their own rotary settings.
    rotary_fraction: default of ROTARY_FRACTION; None if the class rotates whole
      heads.
    rotary_size: (key, default) of the number of rotated dimensions, if the
      class has such a key instead of a fraction.
    rotary_base: default of ROTARY_BASE; None if the class lacks the key.
    rotary_pairs: which elements of a head the class rotates as pairs.
    older_names: {name of a rotary key before transformers 5: its name now}.
    constants: {key: the one value that we compute}.
    names: {our name of a parameter in a layer: name in transformers; {} is the
      layer's number, and a second {} the expert's, if each expert has its own
      tensor}. The constructor also takes names of modules, such as
      "model.norm", for a weight and perhaps a bias.
    other_names: names of some parameters in other files of the class.
    is_conv1d: whether kernels are [inputs, outputs].
    joins_heads: whether the order of joined q, k and v is [heads, 3, d_kv];
      otherwise it is [q | k | v].
  """

  architecture: str
  model_type: str
  settings: Mapping[str, object]
  names: Mapping[str, str]
  sizes: Mapping[str, str] = dataclasses.field(default_factory=lambda: SIZES)
  start_id: int | None = None
  has_key_heads: bool = True
  has_head_dim: bool = True
  has_dense_layers: bool = False
  key_heads: int | None = None
  head_dim: int | None = None
  choices: Mapping[str, Choice] = dataclasses.field(default_factory=dict)
  numbers: Mapping[str, Number] = dataclasses.field(default_factory=dict)
  biases: Mapping[str, tuple[str, bool]] = dataclasses.field(
    default_factory=dict
  )
  window: int | None = None
  period: int | None = None
  global_positions: str = "rotary"
  window_base: float | None = None
  rotary_fraction: float | None = None
  rotary_size: tuple[str, int] | None = None
  rotary_base: float | None = None
  rotary_pairs: str = "halves"
  older_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  constants: Mapping[str, object] = dataclasses.field(default_factory=dict)
  other_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  is_conv1d: bool = False
  joins_heads: bool = False

  def __post_init__(self) -> None:
    """Replaces names of modules in `names` by NAME.weight and NAME.bias."""
    found = {}
    for ours, theirs in self.names.items():
      weight, bias = ours, f"{ours}_bias"
      if ours.endswith("norm"):
        weight, bias = f"{ours}/scale", f"{ours}/bias"
      # Names of experts' tensors are whole; some have no ".weight".
      is_whole = theirs.endswith((".weight", ".bias")) or "experts/" in ours
      ends = {ours: ""} if is_whole else {weight: ".weight", bias: ".bias"}
      found |= {part: f"{theirs}{end}" for part, end in ends.items()}
    object.__setattr__(self, "names", found)

  @property
  def has_experts(self) -> bool:
    """Whether models of the class have experts."""
    return "num_experts" in self.sizes.values()

  def in_files(self, shapes: Mapping[str, object], num_layers: int) -> "Family":
    """Returns the class, with `other_names` if the tensors have these names."""
    last = self.other_names.get("mlp/experts/wo", "")
    has_others = any(last.format(i, 0) in shapes for i in range(num_layers))
    names = {**self.names, **(self.other_names if has_others else {})}
    return dataclasses.replace(self, names=names)
