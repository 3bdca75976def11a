# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers' classes that compute our models exactly, as data.

A family says which settings its class has, which key of config.json holds which
setting, and how it names and stores tensors. config_json.py and weights.py read
families; a new family is one more entry here.
"""

import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from palm_mtf.config import ModelConfig

# Types of layers, with a window and without.
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
_EXPERT_SIZES = {
  "num_experts": "num_experts",
  "num_experts_per_tok": "experts_per_token",
}
# Further names of these keys in configurations of some versions.
OTHER_SIZES = {"num_local_experts": "num_experts", **SIZES, **_EXPERT_SIZES}
_GPT_SIZES = {
  "vocab_size": "vocab_size",
  "n_embd": "d_model",
  "n_inner": "d_ff",
  "n_layer": "num_layers",
  "n_head": "num_heads",
  "n_positions": "sequence_length",
}


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


# {setting: size whose inverse root is the setting's value if it is None}
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
      except each `period`-th have the window; None if its layers are alike.
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
    """Returns the class with those of its names that the tensors have."""
    last = self.other_names.get("mlp/experts/wo", "")
    has_others = any(last.format(i, 0) in shapes for i in range(num_layers))
    names = {**self.names, **(self.other_names if has_others else {})}
    return dataclasses.replace(self, names=names)


def _epsilon(default: float) -> Number:
  return Number("norm_epsilon", default)


def _tie(default: bool) -> Choice:
  return Choice("output_embedding", {True: "tied", False: "separate"}, default)


def name_experts(
  name: str, gate: str = "gate", up: str = "up", down: str = "down"
) -> dict[str, str]:
  """Returns `Family.names` of experts; "*" in `name` stands for the kernel."""
  kernels = {"wi_gate": gate, "wi": up, "wo": down}
  return {f"mlp/experts/{k}": name.replace("*", x) for k, x in kernels.items()}


_BOOLS = {x: x for x in (True, False)}
_SWIGLU = Choice("mlp", {"silu": "swiglu", "swish": "swiglu"}, "silu")
_GELUS = {
  "gelu_new": "gelu_tanh",
  "gelu_pytorch_tanh": "gelu_tanh",
  "gelu_fast": "gelu_tanh",
  "gelu": "gelu",
  "relu": "relu",
  "relu2": "relu2",
}
_LLAMA_NAMES = {
  "embedding": "model.embed_tokens.weight",
  "output_embedding": "lm_head.weight",
  "logits/bias": "lm_head.bias",
  "final_norm": "model.norm",
  "norm": "model.layers.{}.input_layernorm",
  "mlp_norm": "model.layers.{}.post_attention_layernorm",
  "attention/q": "model.layers.{}.self_attn.q_proj",
  "attention/k": "model.layers.{}.self_attn.k_proj",
  "attention/v": "model.layers.{}.self_attn.v_proj",
  "attention/o": "model.layers.{}.self_attn.o_proj",
  "attention/q_norm": "model.layers.{}.self_attn.q_norm",
  "attention/k_norm": "model.layers.{}.self_attn.k_norm",
  "mlp/wi_gate": "model.layers.{}.mlp.gate_proj",
  "mlp/wi": "model.layers.{}.mlp.up_proj",
  "mlp/wo": "model.layers.{}.mlp.down_proj",
}
_LLAMA_SETTINGS = {"block": "serial", "norm": "rms_norm", "logits_scale": 1.0}

LLAMA = Family(
  architecture="LlamaForCausalLM",
  model_type="llama",
  start_id=1,
  settings=_LLAMA_SETTINGS,
  choices={"hidden_act": _SWIGLU, "tie_word_embeddings": _tie(False)},
  numbers={"rms_norm_eps": _epsilon(1e-6)},
  biases={"attention_bias": ("qkv,o", False), "mlp_bias": ("mlp", False)},
  rotary_base=10_000.0,
  names=_LLAMA_NAMES,
)
MISTRAL = dataclasses.replace(
  LLAMA,
  architecture="MistralForCausalLM",
  model_type="mistral",
  biases={},
  key_heads=8,
  window=4096,
)
GEMMA = Family(
  architecture="GemmaForCausalLM",
  model_type="gemma",
  start_id=2,
  settings={
    "block": "serial",
    "norm": "rms_norm_1p",
    "embedding_scale": lambda d_model: d_model**0.5,
    "logits_scale": 1.0,
  },
  choices={
    # "gelu" in old configurations of Gemma means the tanh approximation.
    "hidden_act": Choice(
      "mlp",
      {"gelu_pytorch_tanh": "geglu_tanh", "gelu": "geglu_tanh"},
      "gelu_pytorch_tanh",
      ("hidden_activation",),
    ),
    "tie_word_embeddings": _tie(True),
  },
  numbers={"rms_norm_eps": _epsilon(1e-6)},
  biases={"attention_bias": ("qkv,o", False)},
  key_heads=16,
  head_dim=256,
  rotary_base=10_000.0,
  constants={"use_bidirectional_attention": None},
  names=_LLAMA_NAMES,
)
GEMMA3 = dataclasses.replace(
  GEMMA,
  architecture="Gemma3ForCausalLM",
  model_type="gemma3_text",
  settings={**GEMMA.settings, "branch_norm": True, "qk_norm": "rms_norm_1p"},
  choices={
    "hidden_activation": Choice(
      "mlp", {"gelu_pytorch_tanh": "geglu_tanh"}, "gelu_pytorch_tanh"
    ),
    "tie_word_embeddings": _tie(True),
  },
  numbers={
    "rms_norm_eps": _epsilon(1e-6),
    "query_pre_attn_scalar": Number("score_scale", 256, power=-2),
  },
  key_heads=4,
  window=4096,
  period=6,
  window_base=10_000.0,
  rotary_base=1_000_000.0,
  constants={
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "use_bidirectional_attention": False,
  },
  names={
    **_LLAMA_NAMES,
    "attention_output_norm": "model.layers.{}.post_attention_layernorm",
    "mlp_norm": "model.layers.{}.pre_feedforward_layernorm",
    "mlp_output_norm": "model.layers.{}.post_feedforward_layernorm",
  },
)
COHERE = dataclasses.replace(
  LLAMA,
  architecture="CohereForCausalLM",
  model_type="cohere",
  start_id=5,
  settings={"block": "parallel", "norm": "layer_norm"},
  choices={"hidden_act": _SWIGLU, "tie_word_embeddings": _tie(True)},
  numbers={
    "layer_norm_eps": _epsilon(1e-5),
    "logit_scale": Number("logits_scale", 0.0625),
  },
  biases={"attention_bias": ("qkv,o", False)},
  rotary_base=500_000.0,  # as in transformers 5; before, 10,000
  rotary_pairs="neighbours",
  constants={"use_qk_norm": False},
)
COHERE2 = dataclasses.replace(
  COHERE,
  architecture="Cohere2ForCausalLM",
  model_type="cohere2",
  window=4096,
  period=4,
  global_positions="none",
  rotary_base=10_000.0,
  constants={},
)
GRANITE = dataclasses.replace(
  LLAMA,
  architecture="GraniteForCausalLM",
  model_type="granite",
  settings={"block": "serial", "norm": "rms_norm"},
  numbers={
    "rms_norm_eps": _epsilon(1e-6),
    "logits_scaling": Number("logits_scale", 1.0, power=-1),
    "embedding_multiplier": Number("embedding_scale", 1.0),
    "attention_multiplier": Number("score_scale", 1.0),
  },
  constants={"residual_multiplier": 1.0},
)
_GPT_SETTINGS = {
  "norm": "layer_norm_bias",
  "attention": "multi_head",
  "logits_scale": 1.0,
}
_GPT_NAMES = {
  "embedding": "transformer.wte.weight",
  "output_embedding": "lm_head.weight",
  "logits/bias": "lm_head.bias",
  "norm": "transformer.h.{}.ln_1",
  "mlp_norm": "transformer.h.{}.ln_2",
  "final_norm": "transformer.ln_f",
}
GPT2 = Family(
  architecture="GPT2LMHeadModel",
  model_type="gpt2",
  start_id=50_256,
  settings={
    **_GPT_SETTINGS,
    "block": "serial",
    "positions": "learned",
    "biases": "qkv,o,mlp",
  },
  sizes=_GPT_SIZES,
  has_key_heads=False,
  choices={
    "activation_function": Choice("mlp", _GELUS, "gelu_new"),
    "tie_word_embeddings": _tie(True),
  },
  numbers={"layer_norm_epsilon": _epsilon(1e-5)},
  constants={
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
  },
  names={
    **_GPT_NAMES,
    "position_embedding": "transformer.wpe.weight",
    **{f"attention/{x}": "transformer.h.{}.attn.c_attn" for x in "qkv"},
    "attention/o": "transformer.h.{}.attn.c_proj",
    "mlp/wi": "transformer.h.{}.mlp.c_fc",
    "mlp/wo": "transformer.h.{}.mlp.c_proj",
  },
  is_conv1d=True,
)
GPTJ = dataclasses.replace(
  GPT2,
  architecture="GPTJForCausalLM",
  model_type="gptj",
  settings={**_GPT_SETTINGS, "block": "parallel", "biases": "mlp,logits"},
  choices={
    "activation_function": Choice("mlp", _GELUS, "gelu_new"),
    "tie_word_embeddings": _tie(False),
  },
  rotary_size=("rotary_dim", 64),
  rotary_pairs="neighbours",
  constants={},
  is_conv1d=False,
  names={
    **_GPT_NAMES,
    **{f"attention/{x}": f"transformer.h.{{}}.attn.{x}_proj" for x in "qkv"},
    "attention/o": "transformer.h.{}.attn.out_proj",
    "mlp/wi": "transformer.h.{}.mlp.fc_in",
    "mlp/wo": "transformer.h.{}.mlp.fc_out",
  },
)
GPT_NEOX = Family(
  architecture="GPTNeoXForCausalLM",
  model_type="gpt_neox",
  start_id=0,
  settings={**_GPT_SETTINGS, "biases": "mlp"},
  has_key_heads=False,
  choices={
    "hidden_act": Choice("mlp", _GELUS, "gelu"),
    "tie_word_embeddings": _tie(False),
    "use_parallel_residual": Choice(
      "block", {True: "parallel_two_norms", False: "serial"}, True
    ),
  },
  numbers={"layer_norm_eps": _epsilon(1e-5)},
  biases={"attention_bias": ("qkv,o", True)},
  rotary_fraction=0.25,
  rotary_base=10_000.0,
  older_names={
    "rotary_pct": "partial_rotary_factor",
    "rotary_emb_base": "rope_theta",
  },
  names={
    "embedding": "gpt_neox.embed_in.weight",
    "output_embedding": "embed_out.weight",
    "final_norm": "gpt_neox.final_layer_norm",
    "norm": "gpt_neox.layers.{}.input_layernorm",
    "mlp_norm": "gpt_neox.layers.{}.post_attention_layernorm",
    **dict.fromkeys(
      [f"attention/{x}" for x in "qkv"],
      "gpt_neox.layers.{}.attention.query_key_value",
    ),
    "attention/o": "gpt_neox.layers.{}.attention.dense",
    "mlp/wi": "gpt_neox.layers.{}.mlp.dense_h_to_4h",
    "mlp/wo": "gpt_neox.layers.{}.mlp.dense_4h_to_h",
  },
  joins_heads=True,
)
PHI = Family(
  architecture="PhiForCausalLM",
  model_type="phi",
  start_id=1,
  settings={
    "block": "parallel",
    "norm": "layer_norm_bias",
    "logits_scale": 1.0,
    "biases": "qkv,o,mlp,logits",
  },
  choices={
    "hidden_act": Choice("mlp", _GELUS, "gelu_new"),
    "tie_word_embeddings": _tie(False),
  },
  numbers={"layer_norm_eps": _epsilon(1e-5)},
  rotary_fraction=0.5,
  rotary_base=10_000.0,
  constants={"qk_layernorm": False},
  names={
    **_LLAMA_NAMES,
    "final_norm": "model.final_layernorm",
    "attention/o": "model.layers.{}.self_attn.dense",
    "mlp/wi": "model.layers.{}.mlp.fc1",
    "mlp/wo": "model.layers.{}.mlp.fc2",
  },
)
STABLELM = dataclasses.replace(
  LLAMA,
  architecture="StableLmForCausalLM",
  model_type="stablelm",
  start_id=0,
  settings={"block": "serial", "norm": "layer_norm_bias", "logits_scale": 1.0},
  numbers={"layer_norm_eps": _epsilon(1e-5)},
  biases={"use_qkv_bias": ("qkv", False)},
  rotary_fraction=0.25,
  constants={"qk_layernorm": False, "use_parallel_residual": False},
)
QWEN2 = dataclasses.replace(
  LLAMA,
  architecture="Qwen2ForCausalLM",
  model_type="qwen2",
  start_id=None,
  settings={**_LLAMA_SETTINGS, "biases": "qkv"},
  biases={},
  key_heads=32,
  constants={"use_sliding_window": False},
)
QWEN3 = dataclasses.replace(
  LLAMA,
  architecture="Qwen3ForCausalLM",
  model_type="qwen3",
  start_id=None,
  settings={**_LLAMA_SETTINGS, "qk_norm": "rms_norm"},
  biases={"attention_bias": ("qkv,o", False)},
  key_heads=32,
  head_dim=128,
  constants={"use_sliding_window": False},
)
# transformers 5 can also write all experts of a layer as two tensors.
_STACKED_EXPERTS = {
  "mlp/router": "model.layers.{}.mlp.gate.weight",
  **name_experts("model.layers.{}.mlp.experts.*_proj", "gate_up", "gate_up"),
}
MIXTRAL = dataclasses.replace(
  MISTRAL,
  architecture="MixtralForCausalLM",
  model_type="mixtral",
  settings={**_LLAMA_SETTINGS, "mlp": "experts"},
  sizes={
    **SIZES,
    "intermediate_size": "expert_size",
    "num_local_experts": "num_experts",
    "num_experts_per_tok": "experts_per_token",
  },
  choices={
    "hidden_act": _SWIGLU._replace(setting="expert_mlp"),
    "tie_word_embeddings": _tie(False),
  },
  numbers={"rms_norm_eps": _epsilon(1e-5)},
  window=0,
  rotary_base=1_000_000.0,
  constants={"router_jitter_noise": 0.0},
  names={
    **_LLAMA_NAMES,
    "mlp/router": "model.layers.{}.block_sparse_moe.gate",
    **name_experts(
      "model.layers.{}.block_sparse_moe.experts.{}.*.weight", "w1", "w3", "w2"
    ),
  },
  other_names=_STACKED_EXPERTS,
)
OLMOE = dataclasses.replace(
  LLAMA,
  architecture="OlmoeForCausalLM",
  model_type="olmoe",
  start_id=None,
  settings={**MIXTRAL.settings, "qk_norm": "rms_norm_all_heads"},
  sizes={**SIZES, **_EXPERT_SIZES, "intermediate_size": "expert_size"},
  has_head_dim=False,
  choices={
    **MIXTRAL.choices,
    "norm_topk_prob": Choice("router_normalizes", _BOOLS, False),
  },
  numbers={"rms_norm_eps": _epsilon(1e-5)},
  biases={"attention_bias": ("qkv,o", False)},
  constants={"clip_qkv": None},
  names={
    **_LLAMA_NAMES,
    "mlp/router": "model.layers.{}.mlp.gate",
    **name_experts("model.layers.{}.mlp.experts.{}.*_proj.weight"),
  },
  other_names=_STACKED_EXPERTS,
)
QWEN3_MOE = dataclasses.replace(
  OLMOE,
  architecture="Qwen3MoeForCausalLM",
  model_type="qwen3_moe",
  settings={**MIXTRAL.settings, "qk_norm": "rms_norm"},
  sizes={**SIZES, **_EXPERT_SIZES, "moe_intermediate_size": "expert_size"},
  has_head_dim=True,
  has_dense_layers=True,
  key_heads=4,
  numbers={"rms_norm_eps": _epsilon(1e-6)},
  constants={"use_sliding_window": False},
)

# A model is exported as the first family that computes it.
FAMILIES = (
  *(LLAMA, MISTRAL, QWEN2, QWEN3, GEMMA, GEMMA3, GRANITE, COHERE, COHERE2),
  *(GPT2, GPTJ, GPT_NEOX, PHI, STABLELM, MIXTRAL, OLMOE, QWEN3_MOE),
)
BY_ARCHITECTURE = {x.architecture: x for x in FAMILIES}

# {class of which we compute no model exactly: reason}
REFUSED = {
  "Gemma2ForCausalLM": "it caps logits and scores, and norms the branches",
  "Gemma3ForConditionalGeneration": "it also reads images; give its text model"
  " as a Gemma3ForCausalLM or a GGUF file",
  "Phi3ForCausalLM": "its rotary embedding may be scaled by length",
  "DeepseekV3ForCausalLM": "its attention compresses keys and values",
  "GptOssForCausalLM": "its attention has sinks, and its experts biases",
  "Qwen2MoeForCausalLM": "a gate multiplies its shared expert's result",
  "OPTForCausalLM": "its positions have an offset",
}
