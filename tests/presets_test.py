# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of gin/models have the published models, and plan and train.

gin_test.py tests those of PaLM, unitransformer/encoder_decoder_test.py T5's.
"""

import dataclasses
import json
import re

import pytest

from palm_mtf.accounting.flops import active_parameters
from palm_mtf.accounting.plan import plan_of
from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.cli.gin_folder import gin_folder
from palm_mtf.cli.main import main
from palm_mtf.config import ModelConfig
from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.config_json import list_layers, parse_config
from tests import runs
from tests.accounting.published_sizes import count_all, preset
from tests.planning import plan_config

FILES = {
  x.stem: x
  for x in sorted(gin_folder().glob("models/*.gin"))
  if not x.stem.startswith(("palm_", "t5_"))
}
TINY = [name for name in FILES if name.endswith("_tiny")]
LARGE = [name for name in FILES if name not in TINY]

# {file: (parameters, published)}. A number is the sum of the shapes of released
# weights, or is printed in the paper. The paper of a model whose `published` is
# a text prints only these billions; the parameters then follow from the formula
# of the block.
COUNTS = {
  "gpt3_175b": (174_604_259_328, "174.6"),
  "mt_nlg_530b": (529_581_506_560, "530"),
  # Of the 280B and 70B, 17M and 7M are biases, which the papers do not name.
  "gopher_280b": (279_714_217_984, "280"),
  "chinchilla_70b": (70_063_890_432, "70"),
  # Lingvo prints the number of its model of these sizes, DenseLm128B8x8.
  "lamda_137b": (137_702_416_384, 137_702_416_384),
  "gptj_6b": (6_050_882_784, 6_050_882_784),
  "gpt_neox_20b": (20_554_567_680, 20_554_567_680),
  "llama_7b": (6_738_415_616, "6.7"),
  "llama_13b": (13_015_864_320, "13.0"),
  "llama_33b": (32_528_943_616, "32.5"),
  "llama_65b": (65_285_660_672, "65.3"),  # the paper truncates to 65.2
  "llama3_8b": (8_030_261_248, 8_030_261_248),
  "gemma_2b": (2_506_434_560, 524_550_144 + 1_981_884_416),
  "gemma3_270m": (268_098_176, 268_098_176),
  "smollm2_135m": (134_515_008, 134_515_008),
  "mixtral_8x7b": (46_702_792_704, 46_702_792_704),
  "qwen3_30b_a3b": (30_532_122_624, 30_532_122_624),
  "glam_64b_64e": (1_161_756_418_048, "1162"),
}


@pytest.mark.parametrize("name", LARGE)
def test_a_model_has_the_published_number_of_parameters(name):
  parameters, published = COUNTS[name]
  assert count_all(preset(name)) == parameters
  if isinstance(published, str):
    digits = len(published.partition(".")[2])
    assert f"{parameters / 1e9:.{digits}f}" == published
  else:
    assert parameters == published


@pytest.mark.parametrize(
  ("name", "billions"),
  [
    ("mixtral_8x7b", "12.9"),  # Jiang et al. 2024, Table 2: 13B
    ("qwen3_30b_a3b", "3.4"),  # Qwen team 2025: 3.3B, without the embedding
    ("glam_64b_64e", "96.6"),  # Du et al. 2022, Table 4
  ],
)
def test_a_token_uses_the_published_number_of_parameters(name, billions):
  assert f"{active_parameters(preset(name)) / 1e9:.1f}" == billions


def test_glam_has_the_parameters_of_its_table_without_routers():
  """1.2T and 96.6B in the paper."""
  model = preset("glam_64b_64e")
  routers = 32 * model.d_model * model.num_experts
  assert count_parameters(model) - routers == 1_161_738_584_064
  assert active_parameters(model) - routers == 96_586_694_656


def test_deepseek_v3_has_its_counts_with_the_paper_s_attention():
  """671B parameters, of which a token uses 37B (DeepSeek-AI 2024, 4.2)."""
  model = ModelConfig(
    num_layers=61,
    layers="3*dense, 58*sparse",
    variants={"dense": {"MLP": "swiglu"}, "sparse": {}},
    d_model=7168,
    num_heads=128,
    d_kv=128,
    d_ff=18432,
    vocab_size=129_280,
    sequence_length=4096,
    block="serial",
    attention="multi_head",
    mlp="experts",
    num_experts=256,
    experts_per_token=8,
    d_expert=2048,
    shared_experts=1,
    router="sigmoid",
    router_bias=True,
    output_embedding="separate",
  )
  ours = 4 * 7168 * 128 * 128
  # Multi-head latent attention: q through 1,536 numbers; k and v through 512;
  # and 64 rotated numbers, of each head of q, and of k once.
  latent = 7168 * 1536 + 1536 * 128 * (128 + 64) + 7168 * (512 + 64)
  latent += 512 * 128 * (128 + 128) + 128 * 128 * 7168
  change = 61 * (latent - ours)
  assert f"{(count_parameters(model) + change) / 1e9:.0f}" == "671"
  table = model.vocab_size * model.d_model  # a token reads one row of it
  active = active_parameters(model) + change - table
  assert f"{active / 1e9:.0f}" == "37"


def test_lamda_has_137_billion_parameters_without_its_embedding():
  model = preset("lamda_137b")
  table = model.vocab_size * model.d_model
  assert f"{(count_all(model) - table) / 1e9:.0f}" == "137"


@pytest.mark.parametrize(
  ("millions", "depth", "d_model", "heads"),
  [(44, 8, 512, 8), (57, 9, 576, 9), (90, 13, 640, 10), (163, 18, 768, 12)],
)
def test_gophers_block_has_the_counts_of_chinchillas_small_models(
  millions, depth, d_model, heads
):
  """Hoffmann et al. 2022, Table A9: so the embedding is tied.

  Each layer also has a projection of relative positions.
  """
  model = dataclasses.replace(
    preset("chinchilla_70b"),
    num_layers=depth,
    d_model=d_model,
    num_heads=heads,
    d_kv=64,
    d_ff=4 * d_model,
  )
  assert round(count_all(model) / 1e6) == millions


@pytest.mark.parametrize("name", FILES)
def test_the_header_has_the_number_of_parameters(name):
  count = f"\n# Parameters: {count_all(preset(name)):,}.\n"
  assert count in FILES[name].read_text(encoding="ascii")


def llama(width, depth, heads, d_ff, **changes):
  """Returns a config.json of transformers' LLaMA; defaults are those of 7B."""
  return (
    dict(
      architectures=["LlamaForCausalLM"],
      hidden_act="silu",
      hidden_size=width,
      intermediate_size=d_ff,
      num_hidden_layers=depth,
      num_attention_heads=heads,
      max_position_embeddings=2048,
      rms_norm_eps=1e-6,
      tie_word_embeddings=False,
      vocab_size=32000,
    )
    | changes
  )


def gpt2(width, depth, heads):
  return dict(
    architectures=["GPT2LMHeadModel"],
    activation_function="gelu_new",
    n_embd=width,
    n_inner=None,
    n_layer=depth,
    n_head=heads,
    n_positions=2048,
    layer_norm_epsilon=1e-5,
    vocab_size=50257,
  )


# {file: config.json of the released weights, or, of GPT-3 and MT-NLG, the class
# of transformers with the sizes of the paper}
CONFIGS = {
  "gpt3_175b": gpt2(12288, 96, 96),
  "mt_nlg_530b": gpt2(20480, 105, 128),
  "gptj_6b": dict(
    architectures=["GPTJForCausalLM"],
    activation_function="gelu_new",
    layer_norm_epsilon=1e-5,
    n_embd=4096,
    n_head=16,
    n_inner=None,
    n_layer=28,
    n_positions=2048,
    rotary_dim=64,
    tie_word_embeddings=False,
    vocab_size=50400,
  ),
  "gpt_neox_20b": dict(
    architectures=["GPTNeoXForCausalLM"],
    hidden_act="gelu_fast",
    hidden_size=6144,
    intermediate_size=24576,
    layer_norm_eps=1e-5,
    max_position_embeddings=2048,
    num_attention_heads=64,
    num_hidden_layers=44,
    rotary_emb_base=10000,
    rotary_pct=0.25,
    tie_word_embeddings=False,
    vocab_size=50432,
  ),
  "llama_7b": llama(4096, 32, 32, 11008),
  "llama_13b": llama(5120, 40, 40, 13824),
  "llama_33b": llama(6656, 60, 52, 17920),
  "llama_65b": llama(8192, 80, 64, 22016, rms_norm_eps=1e-5),
  "llama3_8b": llama(
    *(4096, 32, 32, 14336),
    max_position_embeddings=8192,
    num_key_value_heads=8,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    vocab_size=128256,
  ),
  "smollm2_135m": llama(
    *(576, 30, 9, 1536),
    max_position_embeddings=8192,
    num_key_value_heads=3,
    rms_norm_eps=1e-5,
    rope_theta=100000,
    tie_word_embeddings=True,
    vocab_size=49152,
  ),
  "gemma_2b": dict(
    architectures=["GemmaForCausalLM"],
    head_dim=256,
    hidden_act="gelu",
    hidden_size=2048,
    intermediate_size=16384,
    max_position_embeddings=8192,
    num_attention_heads=8,
    num_hidden_layers=18,
    num_key_value_heads=1,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    vocab_size=256000,
  ),
  "gemma3_270m": dict(
    architectures=["Gemma3ForCausalLM"],
    head_dim=256,
    hidden_activation="gelu_pytorch_tanh",
    hidden_size=640,
    intermediate_size=2048,
    layer_types=(["sliding_attention"] * 5 + ["full_attention"]) * 3,
    max_position_embeddings=32768,
    num_attention_heads=4,
    num_hidden_layers=18,
    num_key_value_heads=1,
    query_pre_attn_scalar=256,
    rms_norm_eps=1e-6,
    rope_local_base_freq=10000.0,
    rope_theta=1000000.0,
    sliding_window=512,
    vocab_size=262144,
  ),
  # huggingface.co/mistralai/Mixtral-8x7B-v0.1
  "mixtral_8x7b": dict(
    architectures=["MixtralForCausalLM"],
    attention_dropout=0.0,
    bos_token_id=1,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    intermediate_size=14336,
    max_position_embeddings=32768,
    model_type="mixtral",
    num_attention_heads=32,
    num_experts_per_tok=2,
    num_hidden_layers=32,
    num_key_value_heads=8,
    num_local_experts=8,
    output_router_logits=False,
    rms_norm_eps=1e-5,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.02,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.36.0.dev0",
    use_cache=True,
    vocab_size=32000,
  ),
  # huggingface.co/Qwen/Qwen3-30B-A3B
  "qwen3_30b_a3b": dict(
    architectures=["Qwen3MoeForCausalLM"],
    attention_bias=False,
    attention_dropout=0.0,
    bos_token_id=151643,
    decoder_sparse_step=1,
    eos_token_id=151645,
    head_dim=128,
    hidden_act="silu",
    hidden_size=2048,
    initializer_range=0.02,
    intermediate_size=6144,
    max_position_embeddings=40960,
    max_window_layers=48,
    mlp_only_layers=[],
    model_type="qwen3_moe",
    moe_intermediate_size=768,
    norm_topk_prob=True,
    num_attention_heads=32,
    num_experts=128,
    num_experts_per_tok=8,
    num_hidden_layers=48,
    num_key_value_heads=4,
    output_router_logits=False,
    rms_norm_eps=1e-6,
    rope_scaling=None,
    rope_theta=1000000.0,
    router_aux_loss_coef=0.001,
    sliding_window=None,
    tie_word_embeddings=False,
    torch_dtype="bfloat16",
    transformers_version="4.51.0",
    use_cache=True,
    use_sliding_window=False,
    vocab_size=151936,
  ),
}
# {file: settings in which it differs from CONFIGS, and what CONFIGS has there}
DIFFERENT = {
  # No class of transformers has a layer with a band.
  "gpt3_175b": dict(layers="", variants=None),
  # The paper's embedding; the released one has no rows without a token.
  "gemma_2b": dict(vocab_size=256000),
}


def compare(name, config, **different):
  """Compares a file with a config.json, except in how to compute."""
  found = parse_config(config, "config.json").model
  expected = dataclasses.replace(
    preset(name),
    activation_dtype=found.activation_dtype,
    remat=found.remat,
    **different,
  )
  assert {*found.bias_places} == {*expected.bias_places}
  # The order of places has no meaning, and names of layers have none.
  found = dataclasses.replace(found, biases=expected.biases)
  assert list_layers(found) == list_layers(expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_that_of_the_published_config_json(name, caplog):
  compare(name, CONFIGS[name], **DIFFERENT.get(name, {}))
  assert not caplog.messages  # of keys that are not known


def test_only_models_without_a_class_have_no_config_json():
  assert {*LARGE} - {*CONFIGS} == {
    *("gopher_280b", "chinchilla_70b", "lamda_137b", "glam_64b_64e")
  }


@pytest.mark.peers
@pytest.mark.parametrize(
  ("name", "kind", "different"),
  [
    # The class has the exact GELU, and the released weights the approximation.
    ("gpt_neox_20b", "GPTNeoX", dict(mlp="gelu")),
    ("gptj_6b", "GPTJ", {}),
    ("llama_7b", "Llama", {}),
    # The class has the context of later models.
    ("mixtral_8x7b", "Mixtral", dict(sequence_length=131_072)),
    ("qwen3_30b_a3b", "Qwen3Moe", None),
    ("gemma3_270m", "Gemma3Text", None),
  ],
)
def test_defaults_of_transformers_are_the_model(name, kind, different):
  """None: a class whose defaults are another model, given the released ones."""
  import transformers

  cls = getattr(transformers, f"{kind}Config")
  released = {} if different is not None else CONFIGS[name]
  config = json.loads(cls(**released).to_json_string(use_diff=False))
  config["architectures"] = CONFIGS[name]["architectures"]
  compare(name, config, **different or {})


# {file: (a layout into which a step of 512 sequences fits, changes that it
# needs)}. docs/models.md has this table.
FITTING = {
  "gpt3_175b": ("tpu_palm_540b", {}),
  "mt_nlg_530b": ("tpu_palm_62b", {}),
  "gopher_280b": ("tpu_palm_62b", {}),
  "chinchilla_70b": ("tpu_palm_62b", {}),
  "lamda_137b": ("tpu_palm_62b", {}),
  "gptj_6b": ("tpu_palm_8b", {}),
  "gpt_neox_20b": ("tpu_palm_62b", {}),
  "llama_7b": ("tpu_palm_8b", {}),
  "llama_13b": ("tpu_palm_8b", {"NUM_MICROBATCHES": 8}),
  "llama_33b": ("tpu_palm_8b", {"NUM_MICROBATCHES": 16}),
  "llama_65b": ("tpu_palm_62b", {}),
  "llama3_8b": ("tpu_palm_8b", {"NUM_MICROBATCHES": 16}),
  "gemma_2b": ("tpu_palm_8b", {"NUM_MICROBATCHES": 8}),
  "gemma3_270m": ("tpu_palm_8b", {"NUM_MICROBATCHES": 32}),
  "smollm2_135m": ("tpu_v4_8", {"NUM_MICROBATCHES": 32}),
  "mixtral_8x7b": ("tpu_mixtral_8x7b", {"CAPACITY_FACTOR": 1.25}),
  "qwen3_30b_a3b": ("tpu_qwen3_30b_a3b", {"CAPACITY_FACTOR": 1.25}),
  "glam_64b_64e": ("tpu_glam_64b", {}),
}


@pytest.mark.parametrize("name", FITTING)
def test_a_plan_needs_only_the_model_and_a_layout(name):
  layout, changes = FITTING[name]
  files = f"models/{name}.gin", f"layouts/{layout}.gin"
  planned = plan_of(plan_config(*files, **changes))
  assert planned["fits"] and planned["batch_size"] == 512
  if "NUM_MICROBATCHES" in changes:  # as a plan without it proposes
    assert plan_of(plan_config(*files))["nearest"] == changes


@pytest.mark.parametrize(
  ("layout", "changes"),
  [
    ("tpu_palm_62b", {}),
    ("tpu_palm_62b", {"MESH_SHAPE": "data:128,model:4"}),
  ],
)
def test_without_a_capacity_experts_fit_into_layouts_that_move_no_token(
  layout, changes
):
  name = "qwen3_30b_a3b" if changes else "mixtral_8x7b"
  files = f"models/{name}.gin", f"layouts/{layout}.gin"
  planned = plan_of(plan_config(*files, **changes))
  assert planned["fits"]
  assert not any("all_to_all" in str(x) for x in planned["moved"])


@pytest.mark.parametrize("name", LARGE)
def test_a_layout_that_does_not_divide_a_model_is_refused_with_a_way_out(
  name,
):
  """Of models without experts, those that split experts are refused."""
  for path in gin_folder().glob("layouts/*.gin"):
    macros = {} if path.stem.startswith("tpu") else {"CHIP": "h100_sxm"}
    try:
      plan_config(f"models/{name}.gin", f"layouts/{path.name}", **macros)
    except UserError as error:
      assert re.fullmatch(
        r"(kv_)?(heads|experts)=(\d+) is not divisible by mesh axis (\w+)=\d+ "
        r"\(rule \2:\4\)\. Use a divisor of \3(, such as \4=\d+)?, "
        r"another NUM_((KV_)?HEADS|EXPERTS), or a LAYOUT without \2:\4\."
        r'|layout rule "experts:data" and MLP = .*: the model has no experts; '
        r'leave the rule out, or set MLP = "experts"\.',
        str(error),
      )


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_the_quickstart_trains_a_tiny_model(name, tmp_path):
  corpus, model_dir = runs.write_corpus(tmp_path / "texts"), tmp_path / "run"
  kept = {**runs.SETTINGS, "TRAIN_STEPS": 20, "EVAL_STEPS": 20, "PROMPTS": []}
  model = ("NUM_LAYERS", "D_MODEL", "NUM_HEADS", "D_KV", "D_FF")
  macros = {
    "MODEL_DIR": str(model_dir),
    "TEXT_FILES": f"{corpus}/*.txt",
    **{x: y for x, y in kept.items() if x not in (*model, "SEQUENCE_LENGTH")},
  }
  flags = [f"--gin.{macro}={value!r}" for macro, value in macros.items()]
  recipe = "--gin_file=recipes/quickstart.gin"
  assert main(["train", recipe, f"--gin_file=models/{name}.gin", *flags]) == 0
  losses = [x["loss"] for x in runs.read_metrics(model_dir) if "loss" in x]
  assert losses[-1] < losses[0] - 1
  with open(model_dir / "config.gin", encoding="utf-8") as file:
    assert f"# models/{name}.gin:" in file.read()
