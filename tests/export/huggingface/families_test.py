# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Models of transformers' own classes have the same logits here, and back."""

import json

import numpy as np
import pytest

from palm_mtf.export.huggingface.config_json import (
  make_config,
  parse_config,
  read_config,
)
from palm_mtf.export.huggingface.tensor_files import TensorFiles
from palm_mtf.export.huggingface.weights import (
  check_tensors,
  import_parameters,
)
from tests import oracle
from tests.blocks import block_config
from tests.mtf_testing import run_model
from tests.transformers_folder import parameters, tensors

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
}
HEADS = {"GPT2": "GPT2LMHeadModel"}


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
  check_tensors(files, model, family, str(folder))
  return model, family, import_parameters(model, family, files.read)


def logits_of(peer, tokens):
  """Returns the logits of transformers, in float64."""
  import torch

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
  "GPT-2": "GPT2LMHeadModel",
  "GPT-J": "GPTJForCausalLM",
  "GPT-NeoX": "GPTNeoXForCausalLM",
  "Phi": "PhiForCausalLM",
}
ONE_WIDTH = dict(num_heads=4, d_kv=6, rotary_fraction=2 / 3)


def exported_config(name):
  """Returns a model; where the class wants it, heads are as wide as d_model."""
  has_own_width = name in ("LLaMA", "LLaMA 3", "Mistral", "Qwen 3", "Gemma")
  if has_own_width:
    return block_config(name)
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
