# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""Exported tensors, run as transformers runs them, give our logits.

The forward passes of Cohere and Granite are written here from their published
definitions, in float64 NumPy; the axes are those of oracle.py, S for a half of
the numbers of a head.
"""

import numpy as np
import pytest

from palm_mtf.accounting.params import parameter_shapes
from palm_mtf.errors import UserError
from palm_mtf.huggingface.architecture import (
  COHERE,
  architecture_of,
  from_config,
  to_config,
)
from palm_mtf.huggingface.weights import (
  check_shapes,
  exported,
  imported,
  tensor_shapes,
)
from tests import oracle
from tests.mtf_testing import random_tokens, run_model, small_config

EXACT = [
  {},
  {"attention": "multi_head"},
  {"final_norm_scale": "none"},
  {"block": "serial", "norm": "rms_norm"},
  {"block": "serial", "norm": "rms_norm", "attention": "multi_head"},
]


def _config_json(model) -> dict:
  return to_config(model, start_id=1, eod_id=1, packing="joined")


def _parameters(model) -> dict[str, np.ndarray]:
  params = oracle.random_parameters(model, seed=1)
  return {name: x.astype(np.float32) for name, x in params.items()}


def _export(model, params) -> dict[str, np.ndarray]:
  read = exported(model, architecture_of(model), params.__getitem__)
  return {name: read(name) for name in tensor_shapes(model)}


def _linear(tensors, name, x):
  return x @ tensors[f"model.{name}.weight"].astype(np.float64).T


def _interleaved(x, cos_LS, sin_LS):
  even, odd = x[..., ::2], x[..., 1::2]
  turned = np.stack(
    [even * cos_LS - odd * sin_LS, odd * cos_LS + even * sin_LS], -1
  )
  return turned.reshape(x.shape)


def _halves(x, cos_LS, sin_LS):
  first, second = np.split(x, 2, -1)
  return np.concatenate(
    [first * cos_LS - second * sin_LS, second * cos_LS + first * sin_LS], -1
  )


def _attention(config, tensors, layer, x_BLD, rotate):
  batch, length, _ = x_BLD.shape
  d_kv = config["head_dim"]

  def heads(name, num_heads):  # [B, H, L, K]
    y = _linear(tensors, f"{layer}.self_attn.{name}_proj", x_BLD)
    return y.reshape(batch, length, num_heads, d_kv).swapaxes(1, 2)

  num_heads, shared = (
    config["num_attention_heads"],
    config["num_key_value_heads"],
  )
  frequency_S = config["rope_theta"] ** (-np.arange(0, d_kv, 2) / d_kv)
  angle_LS = np.arange(length)[:, None] * frequency_S
  q = rotate(heads("q", num_heads), np.cos(angle_LS), np.sin(angle_LS))
  k = rotate(heads("k", shared), np.cos(angle_LS), np.sin(angle_LS))
  k, v = (np.repeat(x, num_heads // shared, 1) for x in (k, heads("v", shared)))
  scores = q @ k.swapaxes(2, 3) * config.get("attention_multiplier", d_kv**-0.5)
  scores = np.where(np.tri(length, dtype=bool), scores, -np.inf)
  weights = np.exp(scores - scores.max(-1, keepdims=True))
  weights /= weights.sum(-1, keepdims=True)
  out = (weights @ v).swapaxes(1, 2).reshape(batch, length, -1)
  return _linear(tensors, f"{layer}.self_attn.o_proj", out)


def _mlp(tensors, layer, x_BLD):
  gate = _linear(tensors, f"{layer}.mlp.gate_proj", x_BLD)
  up = _linear(tensors, f"{layer}.mlp.up_proj", x_BLD)
  hidden = gate / (1 + np.exp(-gate)) * up
  return _linear(tensors, f"{layer}.mlp.down_proj", hidden)


def _cohere(config, tensors, inputs):
  def norm(name, x):
    x = x - x.mean(-1, keepdims=True)
    variance = (x**2).mean(-1, keepdims=True)
    scale = tensors[f"model.{name}.weight"]
    return x / np.sqrt(variance + config["layer_norm_eps"]) * scale

  table = tensors["model.embed_tokens.weight"].astype(np.float64)
  x = table[inputs]
  for i in range(config["num_hidden_layers"]):
    layer = f"layers.{i}"
    y = norm(f"{layer}.input_layernorm", x)
    attention = _attention(config, tensors, layer, y, _interleaved)
    x = x + attention + _mlp(tensors, layer, y)
  return norm("norm", x) @ table.T * config["logit_scale"]


def _granite(config, tensors, inputs):
  def norm(name, x):
    variance = (x**2).mean(-1, keepdims=True)
    scale = tensors[f"model.{name}.weight"]
    return x / np.sqrt(variance + config["rms_norm_eps"]) * scale

  table = tensors["model.embed_tokens.weight"].astype(np.float64)
  x = table[inputs] * config["embedding_multiplier"]
  for i in range(config["num_hidden_layers"]):
    layer, factor = f"layers.{i}", config["residual_multiplier"]
    y = norm(f"{layer}.input_layernorm", x)
    x = x + factor * _attention(config, tensors, layer, y, _halves)
    y = norm(f"{layer}.post_attention_layernorm", x)
    x = x + factor * _mlp(tensors, layer, y)
  return norm("norm", x) @ table.T / config["logits_scaling"]


@pytest.mark.parametrize("changes", EXACT, ids=str)
def test_exported_tensors_give_our_logits_in_the_architecture_named(changes):
  model = small_config(**changes)
  params = _parameters(model)
  inputs = random_tokens(model, batch_size=2, seed=0)["inputs"]
  config = _config_json(model)
  is_cohere = config["architectures"] == [COHERE]
  forward = _cohere if is_cohere else _granite
  actual = forward(config, _export(model, params), inputs)
  expected = oracle.forward(model, params, inputs)
  assert np.abs(actual - expected).max() < 1e-6 * np.ptp(expected)


def test_exported_tensors_give_the_logits_of_the_model_in_float32():
  model = small_config()
  params = _parameters(model)
  batch = random_tokens(model, batch_size=2, seed=0)
  ours = run_model(model, params, batch, backward=False).logits
  theirs = _cohere(_config_json(model), _export(model, params), batch["inputs"])
  assert np.abs(ours - theirs).max() < 1e-4 * np.ptp(theirs)


@pytest.mark.parametrize("changes", EXACT, ids=str)
def test_what_is_exported_is_imported_bit_for_bit(changes):
  model = small_config(**changes)
  params = _parameters(model)
  config, tensors = _config_json(model), _export(model, params)
  again, packing = from_config(config, "folder")
  check_shapes({k: v.shape for k, v in tensors.items()}, again, "folder")
  architecture = config["architectures"][0]
  found = imported(again, architecture, tensors.__getitem__)
  assert packing == "joined"
  assert parameter_shapes(again) == parameter_shapes(model)
  assert found.keys() == params.keys()
  for name, value in params.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
  "changes", [{"norm": "rms_norm"}, {"block": "serial"}], ids=str
)
def test_a_model_that_transformers_does_not_have_is_refused(changes):
  with pytest.raises(
    UserError, match=r"^NORM = .*no architecture of transform"
  ):
    architecture_of(small_config(**changes))


@pytest.mark.parametrize(
  "name, value",
  [
    ("architectures", ["LlamaForCausalLM"]),
    ("layer_norm_eps", 1e-5),
    ("logit_scale", 0.0625),
    ("use_qk_norm", True),
    ("attention_bias", True),
    ("tie_word_embeddings", False),
    ("hidden_act", "gelu"),
    ("rope_theta", 5e5),
    ("rope_parameters", {"rope_type": "yarn"}),
    ("num_key_value_heads", 2),
  ],
)
def test_a_foreign_model_that_computes_otherwise_is_refused(name, value):
  config = {**_config_json(small_config()), name: value}
  with pytest.raises(UserError, match=r"^there: ") as error:
    from_config(config, "there")
  assert "\n" not in str(error.value)


def test_a_config_that_leaves_a_number_out_has_the_default_of_its_class():
  config = _config_json(small_config())
  del config["layer_norm_eps"]  # 1e-5 in Cohere
  with pytest.raises(UserError, match="layer_norm_eps = 1e-05"):
    from_config(config, "there")


def test_a_tensor_of_another_shape_is_named():
  model = small_config()
  shapes = tensor_shapes(model)
  shapes["model.norm.weight"] = (1,)
  with pytest.raises(
    UserError, match=r"model.norm.weight is \(1,\); .*\(24,\)"
  ):
    check_shapes(shapes, model, "there")
