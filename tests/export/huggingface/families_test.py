# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers' own classes have the same logits here, and back."""

import inspect
import json
import re

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.config_json import (
  list_layers,
  make_config,
  parse_config,
  read_config,
)
from palm_mtf.export.huggingface.families import FAMILIES
from palm_mtf.export.huggingface.tensor_files import WEIGHTS, TensorFiles
from palm_mtf.export.huggingface.weights import (
  check_tensors,
  import_parameters,
)
from tests import oracle
from tests.blocks import block_config
from tests.mtf_testing import run_model
from tests.transformers_folder import parameters, tensors, write_tensors

SIZES = dict(
  vocab_size=44,
  hidden_size=24,
  intermediate_size=36,
  num_hidden_layers=2,
  num_attention_heads=4,
  max_position_embeddings=16,
  bos_token_id=1,
  eos_token_id=1,
  pad_token_id=1,
)
GPT_SIZES = dict(
  vocab_size=44,
  n_embd=24,
  n_inner=36,
  n_layer=2,
  n_head=4,
  n_positions=16,
  bos_token_id=1,
  eos_token_id=1,
)
KV = dict(num_key_value_heads=2, head_dim=8)


def rope(**changes):
  return dict(
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, **changes}
  )


# {name: (class of configuration, its arguments)}
MODELS = {
  "LLaMA": ("Llama", dict(SIZES, head_dim=8, rms_norm_eps=1e-5)),
  "LLaMA, all settings": (
    "Llama",
    dict(
      SIZES,
      **KV,
      **rope(rope_theta=5e5),
      attention_bias=True,
      mlp_bias=True,
      tie_word_embeddings=True,
    ),
  ),
  "Mistral": ("Mistral", dict(SIZES, **KV, sliding_window=3)),
  "Qwen2": ("Qwen2", dict(SIZES, num_key_value_heads=2)),
  "Qwen3": ("Qwen3", dict(SIZES, **KV)),
  "Gemma": ("Gemma", dict(SIZES, head_dim=8, num_key_value_heads=1)),
  "Gemma 3": (
    "Gemma3Text",
    dict(SIZES, **KV, num_hidden_layers=8, sliding_window=3),
  ),
  "Gemma 3, all settings": (
    "Gemma3Text",
    dict(
      SIZES,
      **KV,
      rope_parameters={
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {
          **{"rope_type": "linear", "factor": 8.0},
          "rope_theta": 9e5,
        },
      },
      num_hidden_layers=3,
      layer_types=["full_attention"] + ["sliding_attention"] * 2,
      sliding_window=4,
      query_pre_attn_scalar=6,
      attention_bias=True,
      tie_word_embeddings=False,
    ),
  ),
  "Gemma 3, windows only": (
    "Gemma3Text",
    dict(SIZES, **KV, sliding_window=2),
  ),
  "Granite": (
    "Granite",
    dict(
      SIZES,
      num_key_value_heads=2,
      logits_scaling=3.0,
      embedding_multiplier=2.0,
      attention_multiplier=6**-0.5,
    ),
  ),
  "Cohere": (
    "Cohere",
    dict(SIZES, **rope(rope_theta=8e6), num_key_value_heads=2),
  ),
  "Cohere 2": (
    "Cohere2",
    dict(
      SIZES,
      **rope(rope_theta=500.0),
      num_hidden_layers=5,
      num_key_value_heads=2,
      sliding_window=3,
      logit_scale=0.3,
    ),
  ),
  "GPT-2": ("GPT2", GPT_SIZES),
  "GPT-2, exact GELU": ("GPT2", dict(GPT_SIZES, activation_function="gelu")),
  "GPT-J": ("GPTJ", dict(GPT_SIZES, rotary_dim=4)),
  "GPT-NeoX": ("GPTNeoX", dict(SIZES, **rope(partial_rotary_factor=0.34))),
  "GPT-NeoX, serial": (
    "GPTNeoX",
    dict(
      SIZES,
      **rope(partial_rotary_factor=1.0),
      use_parallel_residual=False,
      attention_bias=False,
    ),
  ),
  "Phi": ("Phi", dict(SIZES, **rope(partial_rotary_factor=0.7))),
  "StableLM": (
    "StableLm",
    dict(
      SIZES,
      **rope(partial_rotary_factor=0.4),
      num_key_value_heads=2,
      use_qkv_bias=True,
    ),
  ),
  "Mixtral": ("Mixtral", dict(SIZES, **KV, num_local_experts=5)),
  "Mixtral with one expert per token": (
    "Mixtral",
    dict(SIZES, **KV, num_local_experts=5, num_experts_per_tok=1),
  ),
  "Mixtral with a window": (
    "Mixtral",
    dict(SIZES, **KV, num_local_experts=5, sliding_window=3),
  ),
  **{
    f"{name}, {'' if normalizes else 'not '}normalized": (
      kind,
      dict(
        SIZES,
        **settings,
        num_key_value_heads=2,
        num_experts=6,
        num_experts_per_tok=3,
        norm_topk_prob=normalizes,
      ),
    )
    for normalizes in (True, False)
    for name, kind, settings in (
      ("OLMoE", "Olmoe", {}),
      ("Qwen 3", "Qwen3Moe", dict(head_dim=8, moe_intermediate_size=14)),
    )
  },
  "Qwen 3, dense layers": (
    "Qwen3Moe",
    dict(
      SIZES,
      **KV,
      num_hidden_layers=4,
      num_experts=6,
      num_experts_per_tok=2,
      moe_intermediate_size=14,
      decoder_sparse_step=2,
      mlp_only_layers=[3],
    ),
  ),
}
HEADS = {"GPT2": "GPT2LMHeadModel", "Gemma3Text": "Gemma3ForCausalLM"}


def make_peer(name):
  """Returns a random model of transformers, in float64."""
  import torch
  import transformers

  kind, settings = MODELS[name]
  config = getattr(transformers, f"{kind}Config")(**settings)
  torch.manual_seed(0)
  cls = getattr(transformers, HEADS.get(kind, f"{kind}ForCausalLM"))
  model = cls(config).eval()
  for each in model.parameters():  # also biases and scales of norms
    each.data = torch.randn_like(each) * 0.3 + (0.7 if each.ndim == 1 else 0)
  return model


def import_folder(folder):
  """Returns the model of a folder, its class and its parameters."""
  family, model, *_ = read_config(str(folder))
  files = TensorFiles(str(folder))
  family = family.in_files(files.shapes, model.num_layers)
  check_tensors(files, model, family, str(folder))
  return model, family, import_parameters(model, family, files.read)


def logits_of(peer, tokens):
  """Returns the logits of transformers, in float64."""
  import torch

  if hasattr(peer.config, "num_experts"):  # others have no float64
    peer.set_experts_implementation("eager")
  with torch.no_grad():
    found = peer.double()(torch.tensor(tokens, dtype=torch.long)).logits
  return found.numpy()


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_has_the_logits_of_transformers(name, tmp_path):
  peer = make_peer(name)
  peer.save_pretrained(tmp_path)
  model, _, params = import_folder(tmp_path)
  tokens = np.random.default_rng(1).integers(44, size=[2, 16], dtype=np.int32)
  theirs = logits_of(peer, tokens)
  ours = oracle.forward(
    model, {k: v.astype(float) for k, v in params.items()}, tokens
  )
  assert np.abs(ours - theirs).max() < 1e-6 * np.ptp(theirs)
  batch = {"inputs": tokens, "targets": tokens}
  config = parse_float32(model)
  found = run_model(config, params, batch, backward=False).logits
  assert np.abs(found - theirs).max() < 1e-4 * np.ptp(theirs)


def parse_float32(model):
  import dataclasses

  return dataclasses.replace(model, activation_dtype="float32")


# {settings of tests/blocks.py, or changes of PaLM's: class of transformers}
EXPORTED = {
  "LLaMA": "LlamaForCausalLM",
  "LLaMA 3": "LlamaForCausalLM",
  "Mistral": "MistralForCausalLM",
  "Qwen 3": "Qwen3ForCausalLM",
  "Gemma": "GemmaForCausalLM",
  "Gemma 3": "Gemma3ForCausalLM",
  "Cohere 2": "Cohere2ForCausalLM",
  "GPT-2": "GPT2LMHeadModel",
  "GPT-J": "GPTJForCausalLM",
  "GPT-NeoX": "GPTNeoXForCausalLM",
  "Phi": "PhiForCausalLM",
  "Mixtral": "MixtralForCausalLM",
  "OLMoE with its norm": "OlmoeForCausalLM",
  "Qwen 3 with experts": "Qwen3MoeForCausalLM",
  "Qwen 3, not normalized": "Qwen3MoeForCausalLM",
  "Qwen 3, dense layers": "Qwen3MoeForCausalLM",
}
QWEN3_MOE = dict(qk_norm="rms_norm", d_expert=14)
DENSE = dict(
  num_layers=3,
  layers="dense, 2*sparse",
  variants={"dense": {"MLP": "swiglu"}, "sparse": {}},
)
SPARSE = {
  "Mixtral": ("Mixtral", {}),
  "OLMoE with its norm": ("OLMoE with its norm", dict(d_kv=6)),
  "Qwen 3 with experts": ("Mixtral", QWEN3_MOE),
  "Qwen 3, not normalized": (
    "Mixtral",
    dict(QWEN3_MOE, router_normalizes=False),
  ),
  "Qwen 3, dense layers": ("Mixtral", {**QWEN3_MOE, **DENSE}),
}
ONE_WIDTH = dict(num_heads=4, d_kv=6, rotary_fraction=2 / 3)


def exported_config(name):
  """Returns a model; where the class wants it, heads are as wide as d_model."""
  plain = ("LLaMA", "LLaMA 3", "Mistral", "Qwen 3", "Gemma", "Cohere 2")
  if name in plain:
    return block_config(name)
  if name in SPARSE:
    kind, changes = SPARSE[name]
    return block_config(kind, **changes)
  if name == "Gemma 3":  # query_pre_attn_scalar is a whole number
    return block_config(name, score_scale=0.5)
  if name == "GPT-2":
    return block_config(name, d_kv=6)
  return block_config(name, **ONE_WIDTH)


def export(model):
  """Returns config.json, and the tensors by their names in transformers."""
  config = make_config(model, start_id=1, end_ids=[1], packing="joined")
  return parameters(model), config, tensors(model)


@pytest.mark.parametrize("name", EXPORTED)
def test_an_export_is_imported_bit_for_bit(name):
  """Only the pairs of rotary embedding may differ, which the import chooses."""
  model = exported_config(name)
  params, config, exported = export(model)
  assert config["architectures"] == [EXPORTED[name]]
  family, again, *_ = parse_config(json.loads(json.dumps(config)), "there")
  params_again = import_parameters(again, family, exported.__getitem__)
  _, config_again, exported_again = export(again)
  assert config_again == config
  for key, value in params.items():
    if model.rotary_pairs == again.rotary_pairs or "attention" not in key:
      np.testing.assert_array_equal(params_again[key], value, err_msg=key)
  tokens = np.random.default_rng(1).integers(44, size=[2, 9])
  before, after = (
    oracle.forward(
      config, {k: v.astype(float) for k, v in each.items()}, tokens
    )
    for config, each in ((model, params), (again, params_again))
  )
  np.testing.assert_allclose(after, before, rtol=1e-9, atol=1e-9)
  assert exported_again.keys() == exported.keys()


def stack_experts(each):
  """Returns tensors with all experts of a layer in two, as transformers has."""
  found, parts = {}, {}
  for name, value in each.items():
    match = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.(.*)", name)
    expert = match and re.fullmatch(r"experts\.(\d+)\.(\w+)\.weight", match[2])
    if expert:
      parts.setdefault((match[1], expert[2]), []).append(value)
    else:
      is_router = match and match[2] == "gate.weight"
      found[f"{match[1]}.mlp.gate.weight" if is_router else name] = value
  names = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
  stacks = {(x, names.get(y, y)): np.stack(z) for (x, y), z in parts.items()}
  for layer in {layer for layer, _ in stacks}:
    experts = f"{layer}.mlp.experts"
    pair = [stacks[layer, f"{x}_proj"] for x in ("gate", "up")]
    found[f"{experts}.gate_up_proj"] = np.concatenate(pair, 1)
    found[f"{experts}.down_proj"] = stacks[layer, "down_proj"]
  return found


@pytest.mark.parametrize("name", SPARSE)
def test_files_with_stacked_experts_have_the_same_bits(name, tmp_path):
  params, config, each = export(exported_config(name))
  (tmp_path / "config.json").write_text(json.dumps(config))
  write_tensors(tmp_path / WEIGHTS, stack_experts(each))
  _, _, found = import_folder(tmp_path)
  assert found.keys() == params.keys()
  for key, value in params.items():
    np.testing.assert_array_equal(found[key], value, err_msg=key)


def test_a_tensor_of_a_shared_expert_s_gate_is_refused(tmp_path):
  _, config, each = export(exported_config("Mixtral"))
  (tmp_path / "config.json").write_text(json.dumps(config))
  gate = "model.layers.0.mlp.shared_expert_gate.weight"
  for some in (each, stack_experts(each)):
    some[gate] = np.zeros([1, 24], np.float32)
    write_tensors(tmp_path / WEIGHTS, some)
    with pytest.raises(UserError, match=f"{gate}' is .* no such tensor"):
      import_folder(tmp_path)


@pytest.mark.peers
@pytest.mark.parametrize("is_stacked", [False, True])
@pytest.mark.parametrize(
  "name", ["Mixtral", "OLMoE, normalized", "Qwen 3, dense layers"]
)
def test_experts_of_transformers_come_bit_for_bit(name, is_stacked, tmp_path):
  peer = make_peer(name)
  peer.save_pretrained(tmp_path, save_original_format=not is_stacked)
  files = TensorFiles(str(tmp_path))
  assert any(x.endswith("gate_up_proj") for x in files.shapes) == is_stacked
  model, _, params = import_folder(tmp_path)
  theirs = {x: y.detach().numpy() for x, y in peer.state_dict().items()}
  experts = "model.layers.1.mlp.experts"
  gate, up = np.split(theirs[f"{experts}.gate_up_proj"], 2, 1)
  for ours, expected in (
    ("router", theirs["model.layers.1.mlp.gate.weight"].T),
    ("experts/wi_gate", gate.swapaxes(1, 2)),
    ("experts/wi", up.swapaxes(1, 2)),
    ("experts/wo", theirs[f"{experts}.down_proj"].swapaxes(1, 2)),
    ("router_load", np.full(model.num_experts, 1 / model.num_experts, "f")),
  ):
    np.testing.assert_array_equal(params[f"layer_001/mlp/{ours}"], expected)


@pytest.mark.peers
@pytest.mark.parametrize("name", EXPORTED)
def test_transformers_computes_our_logits_of_an_export(name, tmp_path):
  import transformers

  from palm_mtf.export.huggingface.tensor_files import write_safetensors

  model = exported_config(name)
  params, config, tensors = export(model)
  (tmp_path / "config.json").write_text(json.dumps(config))
  shapes = {key: x.shape for key, x in tensors.items()}
  path = str(tmp_path / "model.safetensors")
  write_safetensors(path, shapes, tensors.__getitem__)
  peer, report = transformers.AutoModelForCausalLM.from_pretrained(
    tmp_path, output_loading_info=True
  )
  assert not report["missing_keys"] and not report["unexpected_keys"]
  tokens = np.random.default_rng(1).integers(44, size=[2, 9])
  theirs = logits_of(peer.eval(), tokens)
  ours = oracle.forward(
    model, {k: v.astype(float) for k, v in params.items()}, tokens
  )
  assert np.abs(ours - theirs).max() < 1e-6 * np.ptp(theirs)


def describe(family):
  """Returns the class of configuration, and a config.json with all its keys."""
  import transformers

  cls = getattr(transformers, family.architecture).config_class
  width = "n_embd" if "n_embd" in family.sizes else "hidden_size"
  heads = "n_head" if "n_head" in family.sizes else "num_attention_heads"
  sizes = dict.fromkeys(family.sizes, 64) | {width: 512, heads: 32}
  others = {"rotary_dim": 4, "sliding_window": 8, "attention_multiplier": 0.25}
  others |= {"num_key_value_heads": 2}
  config = cls(**sizes | {x: others[x] for x in others if hasattr(cls(), x)})
  named = {"architectures": [family.architecture]}
  named |= {"head_dim": 16} if family.has_key_heads else {}
  return cls, {**config.to_dict(), **named}


@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.model_type)
def test_a_missing_key_has_the_default_of_the_installed_class(family):
  cls, config = describe(family)
  if not family.period:
    config.pop("layer_types", None)
  whole = parse_config(config, "there").model
  changed = set()
  for key in config.keys() - {"architectures", "model_type"}:
    without = {k: x for k, x in config.items() if k != key}
    try:
      ours = parse_config(without, "there").model
    except UserError:  # sizes, or a default that we do not compute
      continue
    theirs = {**without, **cls.from_dict(without).to_dict()}
    theirs["architectures"] = config["architectures"]
    if not family.period:
      theirs.pop("layer_types", None)
    assert ours == parse_config(theirs, "there").model, key
    if ours != whole:
      changed.add(key)
  if family.rotary_base:
    without = {**config, "rope_parameters": None}
    theirs = cls.from_dict(without).to_dict()["rope_parameters"]
    ours = parse_config(without, "there").model
    bases = {x.rotary_base for x in list_layers(ours)}
    if family.window_base:
      theirs = list(theirs.values())
      assert bases == {family.window_base, family.rotary_base}
      assert bases == {x["rope_theta"] for x in theirs} and len(theirs) == 2
    else:
      assert bases == {theirs["rope_theta"]} == {family.rotary_base}
      share = theirs.get("partial_rotary_factor", 1.0)
      assert ours.rotary_size == int(share * ours.d_kv)
  if family.key_heads:
    assert "num_key_value_heads" in changed


# config.KEY and getattr(config, "KEY") in Python
_READ = re.compile(r'config\.(?!_)(\w+)(?!\w*\()|config, "([a-z]\w+)"')
# A method, keys of masks that the other classes do not make, and keys of the
# Gemma 3 that reads images.
_OTHER = {"get_text_config", "attention_chunk_size", "sliding_window"}
_OTHER |= {"mm_tokens_per_image", "image_token_id"}
_OTHER |= {"vision_config", "text_config"}


@pytest.mark.peers
@pytest.mark.parametrize("family", FAMILIES, ids=lambda x: x.model_type)
def test_no_key_that_a_class_has_or_reads_is_unknown(family, caplog):
  import transformers
  from transformers import masking_utils

  cls, config = describe(family)
  model = getattr(transformers, family.architecture)
  keys = {*cls().to_dict()}
  for part in (inspect.getmodule(model), masking_utils):
    keys |= {x or y for x, y in _READ.findall(inspect.getsource(part))}
  parse_config(config, "there")
  assert not caplog.messages
  for key in keys - config.keys() - _OTHER:
    caplog.clear()
    try:
      parse_config({**config, key: 1}, "there")
    except UserError as error:
      assert key in str(error).lower()
      continue
    assert not caplog.messages, key
