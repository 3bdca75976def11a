# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A config.json describes exactly one of our models, or is refused."""

import pytest

from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.config_json import (
  find_family,
  make_config,
  parse_config,
  read_config,
)
from palm_mtf.export.huggingface.families import BY_ARCHITECTURE
from tests import blocks
from tests.mtf_testing import small_config

SERIAL = {"block": "serial", "norm": "rms_norm"}


def _config(**changes) -> dict:
  model = small_config(**changes)
  return make_config(model, start_id=1, end_ids=[1], packing="joined")


def _refused(**changes) -> str:
  """Returns the error line for a config.json with these keys."""
  with pytest.raises(UserError, match=r"^there: ") as error:
    parse_config({**_config(), **changes}, "there")
  assert len(str(error.value).splitlines()) == 1
  return str(error.value)


@pytest.mark.parametrize(
  "changes",
  [{}, {"attention": "multi_head"}, {"final_norm_scale": "none"}, SERIAL],
  ids=str,
)
def test_what_is_exported_describes_its_model(changes):
  found = parse_config(_config(**changes), "there")
  ours = small_config(**changes, activation_dtype="auto")
  assert (found.model, found.packing) == (ours, "joined")


@pytest.mark.parametrize(
  "content",
  [
    b"",
    b"[]",
    b"3",
    b"\xff{}",
    b"[" * 200_000,
    b'{"architectures":' + b"[" * 90_000 + b"]" * 90_000 + b"}",
    b'{"architectures":' + b"[" * 900 + b"]" * 900 + b"}",
    b'{"vocab_size": ' + b"9" * 5000 + b"}",
  ],
  ids=lambda x: str(x[:9]),
)
def test_a_config_that_describes_no_model_is_refused(content, tmp_path):
  (tmp_path / "config.json").write_bytes(content)
  with pytest.raises(UserError, match=r"config\.json: .*") as error:
    read_config(str(tmp_path))
  assert "\n" not in str(error.value)


@pytest.mark.parametrize(
  "name, value",
  [
    ("architectures", [["CohereForCausalLM"]]),
    ("architectures", [{"a": 1}]),
    ("architectures", ["CohereForCausalLM", "LlamaForCausalLM"]),
    ("architectures", "CohereForCausalLM"),
    ("num_hidden_layers", 10**9),
    ("num_hidden_layers", 10**400),
    ("num_hidden_layers", 2.0),
    ("num_hidden_layers", None),
    ("num_attention_heads", -4),
    ("num_attention_heads", "4"),
    ("num_attention_heads", True),
    ("num_key_value_heads", True),
    ("num_key_value_heads", [1]),
    ("num_key_value_heads", 3),
    ("head_dim", 10.0),
    ("hidden_size", None),
    ("hidden_size", 24.0),
    ("hidden_size", -24),
    ("hidden_size", 0),
    ("vocab_size", 10**18),
    ("max_position_embeddings", 10**18),
    ("max_position_embeddings", -1),
    ("max_position_embeddings", "9"),
    ("logit_scale", 10**400),
    ("logit_scale", float("nan")),
    ("logit_scale", float("inf")),
    ("logit_scale", None),
    ("layer_norm_eps", True),
    ("rope_theta", [1]),
    ("rope_theta", None),
    ("rope_parameters", [1]),
    ("rope_parameters", {"rope_type": {}}),
    ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}),
    ("rope_parameters", {"rope_type": "default", "factor": 2.0}),
    ("rope_parameters", {"partial_rotary_factor": 0.5}),
    ("rope_scaling", {"type": "linear", "factor": 2.0}),
    ("rope_scaling", "linear"),
    ("partial_rotary_factor", 0.5),
    ("hidden_act", ["silu"]),
    ("model_type", "llama"),
    ("tie_word_embeddings", 0),
    ("tie_word_embeddings", None),
    ("quantization_config", {"quant_method": "gptq"}),
    ("compression_config", {"format": "dense"}),
    ("is_causal", False),
    ("is_causal", None),
    ("is_causal", 0),
    ("per_layer_config", {"0": {"head_dim": 4}}),
    ("layer_types", ["sliding_attention"] * 2),
    ("layer_types", ["full_attention"]),
    ("layer_types", "full_attention"),
    ("auto_map", {"AutoModelForCausalLM": "other.Model"}),
    ("pruned_heads", {"0": [1]}),
    ("is_encoder_decoder", True),
    ("rope_interleaved", True),
    ("palm_mtf", {"PACKING": True}),
    ("palm_mtf", {"PACKING": "bogus"}),
    ("palm_mtf", {"PACKING": 'x"\nimport os\n'}),
    ("palm_mtf", {"FINAL_NORM_SCALE": ["learned"]}),
    ("palm_mtf", {"NORM": "rms_norm"}),
    ("palm_mtf", [1]),
    ("palm_mtf", "x" * 10_000),
  ],
  ids=lambda x: str(x)[:40],
)
def test_a_setting_that_is_not_of_our_models_is_named(name, value):
  line = _refused(**{name: value})
  last = list(value)[-1] if isinstance(value, dict) else name
  assert name in line or last in line
  assert len(line) < 1000


def test_a_missing_key_has_the_default_of_its_class():
  config = _config()
  del config["layer_norm_eps"]  # 1e-5 in Cohere
  assert parse_config(config, "there").model.norm_epsilon == 1e-5
  config = _config(**SERIAL)
  del config["tie_word_embeddings"]  # False in Granite
  assert parse_config(config, "there").model.output_embedding == "separate"


def test_a_key_that_nobody_reads_is_named_in_a_warning(caplog):
  """Keys of training, tokens and names, and null, are no reason to warn."""
  config = _config() | {"hidden_act_2": "relu", "use_qk_norms": None}
  config |= {"initializer_range": 0.1, "use_cache": True, "is_causal": True}
  config |= {"layer_types": None, "id2label": {"0": "a"}, "pad_token_id": 3}
  config |= {"is_llama_config": True, "rope_interleaved": False}
  config |= {"transformers.js_config": {}, "model_max_length": 9}
  config |= {"rotary": True, "scale_attn_weights": True}
  assert (
    parse_config(config, "there").model
    == parse_config(_config(), "there").model
  )
  (line,) = caplog.messages
  assert line == (
    "there: palm_mtf does not know these keys of a CohereForCausalLM, and "
    "ignores them: 'hidden_act_2'."
  )


def _gpt_config():
  model = blocks.block_config("GPT-2", d_kv=6)
  return make_config(model, start_id=1, end_ids=[1], packing="joined")


@pytest.mark.parametrize(
  "name, key",
  [
    ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"),
    ("num_hidden_layers", "n_layer"),
    ("max_position_embeddings", "n_positions"),
  ],
)
def test_both_names_of_a_size_of_gpt_2_agree(name, key, caplog):
  """transformers takes the second name too (attribute_map)."""
  config = _gpt_config()
  again = parse_config({**config, name: config[key]}, "there")
  assert again == parse_config(config, "there") and not caplog.messages
  with pytest.raises(UserError, match=f"^there: {name} = 2000: "):
    parse_config({**config, name: 2000}, "there")


# {class: defaults of transformers 5 that other classes or versions do not have}
DEFAULTS = {
  "CohereForCausalLM": {"rope_theta": 500_000.0, "num_key_value_heads": None},
  "MistralForCausalLM": {"num_key_value_heads": 8},
  "GemmaForCausalLM": {"num_key_value_heads": 16, "head_dim": 256},
  "Qwen2ForCausalLM": {"num_key_value_heads": 32},
  "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128},
  "MixtralForCausalLM": {
    "num_key_value_heads": 8,
    "rope_theta": 1_000_000.0,
    "sliding_window": None,
    "router_jitter_noise": 0.0,
  },
  "OlmoeForCausalLM": {"num_key_value_heads": 64, "norm_topk_prob": False},
  "Qwen3MoeForCausalLM": {
    "num_key_value_heads": 4,
    "norm_topk_prob": False,
    "mlp_only_layers": None,
    "decoder_sparse_step": 1,
  },
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_missing_key_has_the_default_of_transformers_5(name):
  family = BY_ARCHITECTURE[name]
  config = {"architectures": [name], **dict.fromkeys(family.sizes, 64)}
  config["hidden_size"] = 128
  for key, value in DEFAULTS[name].items():
    without = parse_config(config, "there").model
    assert parse_config({**config, key: value}, "there").model == without


# Keys of published files, of a Gemma 3 of 1B and of a Command R7B.
GEMMA3_1B = {
  "architectures": ["Gemma3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "attn_logit_softcapping": None,
  "bos_token_id": 2,
  "cache_implementation": "hybrid",
  "eos_token_id": [1, 106],
  "final_logit_softcapping": None,
  "head_dim": 256,
  "hidden_activation": "gelu_pytorch_tanh",
  "hidden_size": 1152,
  "initializer_range": 0.02,
  "intermediate_size": 6912,
  "max_position_embeddings": 32768,
  "model_type": "gemma3_text",
  "num_attention_heads": 4,
  "num_hidden_layers": 26,
  "num_key_value_heads": 1,
  "pad_token_id": 0,
  "query_pre_attn_scalar": 256,
  "rms_norm_eps": 1e-06,
  "rope_local_base_freq": 10000,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": 512,
  "sliding_window_pattern": 6,
  "torch_dtype": "bfloat16",
  "transformers_version": "4.50.0.dev0",
  "use_cache": True,
  "vocab_size": 262144,
}
COMMAND_R7B = {
  "architectures": ["Cohere2ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 5,
  "cache_implementation": "hybrid",
  "eos_token_id": 255001,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "initializer_range": 0.02,
  "intermediate_size": 14336,
  "layer_norm_eps": 1e-05,
  "layer_switch": 4,
  "logit_scale": 0.25,
  "max_position_embeddings": 8192,
  "model_type": "cohere2",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "order_of_interleaved_layers": "local_attn_first",
  "pad_token_id": 0,
  "position_embedding_type": "rope_gptj",
  "rope_scaling": None,
  "rope_theta": 50000,
  "rotary_pct": 1.0,
  "sliding_window": 4096,
  "sliding_window_pattern": 4,
  "torch_dtype": "float16",
  "transformers_version": "4.48.0.dev0",
  "use_cache": True,
  "use_embedding_sharing": True,
  "use_gated_activation": True,
  "use_parallel_block": True,
  "use_parallel_embedding": False,
  "vocab_size": 256000,
}


def test_a_published_gemma_3_is_read_without_a_warning(caplog):
  model = parse_config(GEMMA3_1B, "there").model
  assert model.layers == "4*(5*window, global), 2*window"
  assert model.variants == {
    "window": {"ATTENTION_WINDOW": 512, "ROTARY_BASE": 10_000.0},
    "global": {"ROTARY_BASE": 1_000_000.0},
  }
  assert (model.num_layers, model.score_scale) == (26, None)
  assert (model.branch_norm, model.qk_norm) == (True, "rms_norm_1p")
  assert not caplog.messages
  # The larger models have a scaling of the layers without a window.
  scaled = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}}
  scaled = parse_config({**GEMMA3_1B, **scaled}, "there").model
  plain = {**model.variants["window"], "ROTARY_SCALING": "none"}
  assert scaled.variants["window"] == plain
  assert scaled.variants["global"] == {
    "ROTARY_BASE": 1_000_000.0,
    "ROTARY_SCALING": "linear",
    "ROTARY_FACTOR": 8.0,
  }


def test_a_published_cohere_2_is_read_without_a_warning(caplog):
  model = parse_config(COMMAND_R7B, "there").model
  assert model.layers == "3*window, global"
  assert model.variants == {
    "window": {"ATTENTION_WINDOW": 4096, "ROTARY_BASE": 50_000.0},
    "global": {"POSITIONS": "none"},
  }
  assert (model.block, model.norm) == ("parallel", "layer_norm")
  assert model.logits_scale == 0.25
  assert not caplog.messages


WINDOW, GLOBAL = "sliding_attention", "full_attention"


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0: "),
    ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0: "),
    ({"use_bidirectional_attention": True}, "attention = True: palm_mtf comp"),
    ({"sliding_window": None}, "sliding_window = None: give a whole number"),
    ({"sliding_window_pattern": 0}, "sliding_window_pattern = 0: give a whole"),
    ({"layer_types": [WINDOW]}, "'full_attention' for each of the 26 layers"),
    ({"layer_types": [1] * 26}, "'full_attention' for each of the 26 layers"),
    (
      {"query_pre_attn_scalar": -1},
      "query_pre_attn_scalar = -1: give a number",
    ),
    ({"rope_parameters": {"rope_theta": 1e4}}, "give a table for 'sliding_att"),
    (
      {"rope_parameters": {GLOBAL: {"rope_theta": 1e4}}},
      "rope_theta = 1000000.0: another key says 10000.0",
    ),
    (
      {"architectures": ["Gemma3ForConditionalGeneration"]},
      "it also reads images; give its text model as a Gemma3ForCausalLM",
    ),
  ],
  ids=str,
)
def test_a_gemma_3_that_is_not_computed_is_refused(changes, message):
  with pytest.raises(UserError, match=r"^there: ") as error:
    parse_config({**GEMMA3_1B, **changes}, "there")
  assert message in str(error.value) and "\n" not in str(error.value)


def test_layers_of_any_order_have_a_pattern():
  types = [GLOBAL, *[WINDOW] * 3, GLOBAL, GLOBAL, WINDOW]
  changes = {"num_hidden_layers": 7, "layer_types": types}
  model = parse_config({**GEMMA3_1B, **changes}, "there").model
  assert model.layers == "global, 3*window, 2*global, window"
  only = {"num_hidden_layers": 2, "layer_types": [WINDOW] * 2}
  model = parse_config({**GEMMA3_1B, **only}, "there").model
  assert (model.layers, model.variants) == ("", None)
  assert (model.attention_window, model.rotary_base) == (512, 10_000)


EXPERTS = dict(
  architectures=["Qwen3MoeForCausalLM"],
  hidden_size=24,
  intermediate_size=36,
  max_position_embeddings=16,
  moe_intermediate_size=14,
  norm_topk_prob=True,
  num_attention_heads=4,
  num_experts=6,
  num_experts_per_tok=2,
  num_hidden_layers=4,
  num_key_value_heads=2,
  vocab_size=44,
)
_MIXTRAL, _OLMOE = ["MixtralForCausalLM"], ["OlmoeForCausalLM"]


def test_what_divides_the_scores_of_experts_is_read():
  """Mixtral has no key: it always divides. The others' default is false."""
  for name, value, normalizes in (
    (EXPERTS["architectures"], True, True),
    (EXPERTS["architectures"], False, False),
    (EXPERTS["architectures"], None, False),
    (_OLMOE, True, True),
    (_OLMOE, None, False),
    (_MIXTRAL, None, True),
  ):
    config = {**EXPERTS, "architectures": name, "norm_topk_prob": value}
    config = {k: x for k, x in config.items() if x is not None}
    found = parse_config(config, "there").model
    assert (found.router, found.router_normalizes) == ("softmax", normalizes)


def test_both_names_of_the_number_of_experts_are_read(caplog):
  """transformers 5.23 writes num_local_experts, and earlier ones the other."""
  found = parse_config(EXPERTS, "there")
  config = {**EXPERTS, "num_local_experts": 6}
  assert parse_config(config, "there") == found
  del config["num_experts"]
  assert parse_config(config, "there") == found and not caplog.messages


def test_layers_without_experts_are_a_variant():
  """transformers' Qwen3MoeDecoderLayer."""
  config = {**EXPERTS, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
  model = parse_config(config, "there").model
  assert model.layers == "dense, sparse, 2*dense"
  assert model.variants == {"dense": {"MLP": "swiglu"}, "sparse": {}}
  assert (model.d_ff, model.d_expert) == (36, 14)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"num_experts_per_tok": 7}, "EXPERTS_PER_TOKEN = 7 and NUM_EXPERTS = 6"),
    ({"num_experts": None}, "num_experts = None: give a whole number"),
    ({"num_experts": 10**9}, "num_experts = 1000000000: give a whole number"),
    ({"num_local_experts": 5}, "num_local_experts = 5: palm_mtf computes only"),
    ({"norm_topk_prob": "yes"}, "norm_topk_prob = 'yes': palm_mtf computes"),
    ({"norm_topk_prob": 1}, "norm_topk_prob = 1: palm_mtf computes only with"),
    ({"moe_intermediate_size": 0}, "moe_intermediate_size = 0: give a whole"),
    ({"decoder_sparse_step": 0}, "decoder_sparse_step = 0: give a whole"),
    ({"mlp_only_layers": 3}, "mlp_only_layers = 3: give a list"),
    ({"mlp_only_layers": [0, 1, 2, 3]}, 'only "experts" has this setting'),
    ({"hidden_act": "gelu"}, "hidden_act = 'gelu': palm_mtf computes only"),
    (
      {"architectures": _MIXTRAL, "router_jitter_noise": 0.1},
      "router_jitter_noise = 0.1: palm_mtf computes only with 0.0",
    ),
    (
      {"architectures": _OLMOE, "clip_qkv": 8.0},
      "clip_qkv = 8.0: palm_mtf computes only with None",
    ),
    (
      {"architectures": _OLMOE, "head_dim": 8},
      "head_dim = 8: palm_mtf computes only with 6",
    ),
    *(
      ({"architectures": [f"{name}ForCausalLM"]}, f"{name}ForCausalLM is not")
      for name in ("DeepseekV3", "GptOss", "Qwen2Moe")
    ),
    (
      {"architectures": ["Qwen2MoeForCausalLM"]},
      "a gate multiplies its shared expert's result",
    ),
    ({"architectures": ["DbrxForCausalLM"]}, "the models of palm_mtf are"),
  ],
  ids=str,
)
def test_experts_that_are_not_computed_are_refused(changes, message):
  with pytest.raises(UserError, match=r"^there: ") as error:
    parse_config({**EXPERTS, **changes}, "there")
  assert message in str(error.value) and "\n" not in str(error.value)


# Settings of experts that no class has.
@pytest.mark.parametrize(
  "changes",
  [
    {"router": "sigmoid"},
    {"router": "sigmoid", "router_bias": True},
    {"router_scale": 2.5},
    {"router_normalizes": False},  # a Mixtral, which always divides
    {"shared_experts": 1},
    {"capacity_factor": 1.25},
    {"expert_mlp": "geglu"},
  ],
  ids=str,
)
def test_experts_without_a_class_are_refused_with_a_way_out(changes):
  with pytest.raises(UserError) as error:
    find_family(blocks.block_config("Mixtral", **changes))
  line, (name, value) = str(error.value), next(iter(changes.items()))
  assert f"{name.upper()} = {value!r}" in line and "\n" not in line
  assert line.endswith("; use --format=saved_model or --format=npz.")


NO_WIDTH = "= 0: give a whole number from 1"


@pytest.mark.parametrize(
  "changes, reason",
  [
    ({"architectures": ["Gemma2ForCausalLM"]}, "it caps logits and scores"),
    ({"architectures": ["LlamaForCausalM"]}, 'did you mean "LlamaForCausalLM"'),
    ({"head_dim": 9}, "D_KV = 9: rotary embedding turns pairs"),
    ({"head_dim": None, "num_attention_heads": 0}, NO_WIDTH),
    # hidden_size = 24
    ({"head_dim": None, "num_attention_heads": 25}, NO_WIDTH),
  ],
  ids=str,
)
def test_what_is_not_computed_is_refused_with_the_reason(changes, reason):
  assert reason in _refused(**changes)


def test_what_other_programs_leave_out_or_write_differently_is_accepted():
  config = _config(attention="multi_head", d_kv=6)  # 24 / 4
  for name in ("palm_mtf", "head_dim", "num_key_value_heads", "rope_theta"):
    del config[name]
  config["rope_parameters"] = None
  config["rope_scaling"] = {"type": "default"}
  config["quantization_config"] = None
  found = parse_config(config, "there")
  assert (found.model.attention, found.model.d_kv) == ("multi_head", 6)
  assert found.packing == "joined"  # a text begins with the id that ends it
  config["bos_token_id"] = 0
  assert parse_config(config, "there").packing == "packed"


def test_transformers_4_finds_its_names_of_a_gpt_neox_models_rotation():
  """GPTNeoXConfig of transformers 4 has rotary_pct and rotary_emb_base."""
  changes = {"d_kv": 6, "rotary_fraction": 1 / 3, "rotary_base": 5000.0}
  model = blocks.block_config("GPT-NeoX", **changes)
  config = make_config(model, start_id=1, end_ids=[1], packing="joined")
  assert config["architectures"] == ["GPTNeoXForCausalLM"]
  rope = config["rope_parameters"]
  assert config["rotary_pct"] == rope["partial_rotary_factor"]
  assert config["rotary_emb_base"] == rope["rope_theta"] == 5000.0
