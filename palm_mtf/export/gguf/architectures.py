# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Architectures of llama.cpp, as data.

An architecture is a Hugging Face transformers class (huggingface/families.py)
with other names for keys and tensors. Kernels are always [outputs, inputs].
"""

import dataclasses
from collections.abc import Mapping

from palm_mtf.export.huggingface import families
from palm_mtf.export.huggingface.family import Family
from palm_mtf.export.huggingface.weights import DIVISORS

# {our name of a parameter in a layer: name in GGUF; {} is the layer's number}
NAMES = {
  "norm": "blk.{}.attn_norm",
  "mlp_norm": "blk.{}.ffn_norm",
  "final_norm": "output_norm",
  "attention_output_norm": "blk.{}.post_attention_norm",
  "mlp_output_norm": "blk.{}.post_ffw_norm",
  "attention/q": "blk.{}.attn_q",
  "attention/k": "blk.{}.attn_k",
  "attention/v": "blk.{}.attn_v",
  "attention/o": "blk.{}.attn_output",
  "attention/q_norm": "blk.{}.attn_q_norm",
  "attention/k_norm": "blk.{}.attn_k_norm",
  "mlp/wi_gate": "blk.{}.ffn_gate",
  "mlp/wi": "blk.{}.ffn_up",
  "mlp/wo": "blk.{}.ffn_down",
  "mlp/router": "blk.{}.ffn_gate_inp",
  **families.name_experts("blk.{}.ffn_*_exps.weight"),
  "embedding": "token_embd.weight",
  "position_embedding": "position_embd.weight",
  "output_embedding": "output.weight",
  "logits/bias": "output.bias",
  DIVISORS: "rope_freqs.weight",
}
# Older files have one tensor for each expert.
_EACH_EXPERT = families.name_experts("blk.{}.ffn_*.{}.weight")
_JOINED = {f"attention/{x}": "blk.{}.attn_qkv" for x in "qkv"}
# {key of GGUF: field of ModelConfig; a family has some of the last three}
_SIZES = {
  "context_length": "sequence_length",
  "embedding_length": "d_model",
  "feed_forward_length": "d_ff",
  "block_count": "num_layers",
  "attention.head_count": "num_heads",
  "expert_count": "num_experts",
  "expert_used_count": "experts_per_token",
}


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class GgufArchitecture:
  """An architecture of llama.cpp.

  Attributes:
    name: value of the key general.architecture.
    family: the class of transformers that computes the same models.
    rotary_pairs: which elements of a head llama.cpp rotates as pairs.
    joins_qkv: whether q, k and v are one tensor, [q | k | v].
    scale_offset: number that is added to scales of norms in the file.
    numbers: {key of GGUF: key of config.json} for floats.
    flags: {key of GGUF: key of config.json} for booleans.
    only: {field of ModelConfig: the only value that llama.cpp computes}, where
      the class computes several values; and ROUTER_NORMALIZES.
    constants: {key of GGUF: values that we compute}, besides `_CONSTANTS`.
    has_one_width: whether llama.cpp requires NUM_HEADS * D_KV = D_MODEL.
    scalings: values of ROTARY_SCALING that llama.cpp computes.
  """

  name: str
  family: Family
  rotary_pairs: str = "halves"
  joins_qkv: bool = False
  scale_offset: float = 0.0
  numbers: Mapping[str, str] = dataclasses.field(default_factory=dict)
  flags: Mapping[str, str] = dataclasses.field(default_factory=dict)
  only: Mapping[str, str | bool] = dataclasses.field(default_factory=dict)
  constants: Mapping[str, tuple] = dataclasses.field(default_factory=dict)
  has_one_width: bool = False
  scalings: tuple[str, ...] = ("none", "linear", "yarn")

  @property
  def sizes(self) -> dict[str, str]:
    """{key of GGUF: field of ModelConfig, or expert_size}, as in the family."""
    fields = {*self.family.sizes.values()}
    sizes = {key: x for key, x in _SIZES.items() if x in fields}
    return {"feed_forward_length": "expert_size", **sizes}

  @property
  def layout(self) -> Family:
    """The family, with GGUF's names and layouts of tensors."""
    return dataclasses.replace(
      self.family,
      names={**NAMES, **(_JOINED if self.joins_qkv else {})},
      other_names=_EACH_EXPERT,
      rotary_pairs=self.rotary_pairs,
      is_conv1d=False,
      joins_heads=False,
    )


# llama.cpp's GELU is the tanh approximation.
_TANH = {"mlp": "gelu_tanh"}
_TIED, _SEPARATE = ({"output_embedding": x} for x in ("tied", "separate"))
_NO_BIASES = {"biases": ""}
_EXPERTS = {
  "expert_gating_func": (1,),  # softmax
  "expert_group_count": (0, 1),
  "expert_shared_count": (0,),
  "expert_weights_scale": (0.0, 1.0),
}
# For these, llama.cpp reads divisors of rotary frequencies from the file.
_ALL_SCALINGS = ("none", "linear", "yarn", "llama3")
ARCHITECTURES = (
  *(
    GgufArchitecture(
      name="llama", family=x, rotary_pairs="neighbours", scalings=_ALL_SCALINGS
    )
    for x in (families.LLAMA, families.MISTRAL)
  ),
  GgufArchitecture(name="qwen2", family=families.QWEN2, has_one_width=True),
  GgufArchitecture(name="qwen3", family=families.QWEN3, only=_NO_BIASES),
  GgufArchitecture(
    name="gemma",
    family=families.GEMMA,
    scale_offset=1.0,
    only=_TIED | _NO_BIASES,
  ),
  GgufArchitecture(
    name="gemma3",
    family=families.GEMMA3,
    scale_offset=1.0,
    only=_TIED | _NO_BIASES,
    scalings=("none", "linear"),
  ),
  GgufArchitecture(
    name="granite",
    family=families.GRANITE,
    rotary_pairs="neighbours",
    scalings=_ALL_SCALINGS,
    numbers={
      "logit_scale": "logits_scaling",
      "embedding_scale": "embedding_multiplier",
      "attention.scale": "attention_multiplier",
    },
    # llama.cpp rotates q and k of a granite only if this is true.
    constants={"rope.scaling.finetuned": (True,)},
  ),
  GgufArchitecture(
    name="command-r",
    family=families.COHERE,
    rotary_pairs="neighbours",
    numbers={"logit_scale": "logit_scale"},
    only=_TIED | _NO_BIASES,
    has_one_width=True,
  ),
  GgufArchitecture(
    name="cohere2",
    family=families.COHERE2,
    rotary_pairs="neighbours",
    scalings=("none", "linear"),
    numbers={"logit_scale": "logit_scale"},
    only=_TIED | _NO_BIASES,
    has_one_width=True,
  ),
  GgufArchitecture(
    name="gpt2", family=families.GPT2, joins_qkv=True, only=_TANH
  ),
  GgufArchitecture(
    name="gptneox",
    family=families.GPT_NEOX,
    joins_qkv=True,
    flags={"use_parallel_residual": "use_parallel_residual"},
    only=_TANH | _SEPARATE | {"biases": "mlp,qkv,o"},
  ),
  GgufArchitecture(
    name="phi2", family=families.PHI, only=_TANH | _SEPARATE, has_one_width=True
  ),
  GgufArchitecture(
    name="stablelm",
    family=families.STABLELM,
    flags={"use_parallel_residual": "use_parallel_residual"},
    only=_SEPARATE,
    has_one_width=True,
  ),
  # llama.cpp does not read expert_weights_norm for the architectures below
  # (build_moe_ffn in src/models/llama.cpp, qwen3moe.cpp and olmoe.cpp).
  GgufArchitecture(
    name="llama",
    family=families.MIXTRAL,
    rotary_pairs="neighbours",
    scalings=_ALL_SCALINGS,
    only={"router_normalizes": True},
    constants=_EXPERTS,
  ),
  GgufArchitecture(
    name="qwen3moe",
    family=families.QWEN3_MOE,
    only={"mlp": "experts", "router_normalizes": True} | _NO_BIASES,
    constants=_EXPERTS,
  ),
  GgufArchitecture(
    name="olmoe",
    family=families.OLMOE,
    only={"router_normalizes": False} | _SEPARATE | _NO_BIASES,
    constants=_EXPERTS,
    has_one_width=True,
  ),
)
