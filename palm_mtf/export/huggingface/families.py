# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Hugging Face transformers' classes that compute our models exactly, as data.

A family says which settings its class has, which key of config.json holds which
setting, and how it names and stores tensors. config_json.py and weights.py read
families; a new family is one more entry here.
"""

import dataclasses

from palm_mtf.export.huggingface.family import (
  EXPERT_SIZES,
  SIZES,
  Choice,
  Family,
  Number,
)


def _epsilon(default: float) -> Number:
  return Number("norm_epsilon", default)


def _tie(default: bool) -> Choice:
  return Choice("output_embedding", {True: "tied", False: "separate"}, default)


def name_experts(
  name: str, gate: str = "gate", up: str = "up", down: str = "down"
) -> dict[str, str]:
  """Returns `Family.names` of experts: `name` with a kernel in place of "*"."""
  kernels = {"wi_gate": gate, "wi": up, "wo": down}
  return {f"mlp/experts/{k}": name.replace("*", x) for k, x in kernels.items()}


_GPT_SIZES = {
  "vocab_size": "vocab_size",
  "n_embd": "d_model",
  "n_inner": "d_ff",
  "n_layer": "num_layers",
  "n_head": "num_heads",
  "n_positions": "sequence_length",
}
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
  choices={**GPT2.choices, "tie_word_embeddings": _tie(False)},
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
# transformers 5 can also write all experts of a layer as two tensors: one joins
# wi_gate and wi, and the other is wo.
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
  sizes={**SIZES, **EXPERT_SIZES, "intermediate_size": "expert_size"},
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
  sizes={**SIZES, **EXPERT_SIZES, "moe_intermediate_size": "expert_size"},
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
