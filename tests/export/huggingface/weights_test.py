# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: N803, N806 (names end in the letters of their axes)
"""Exported tensors give our logits in the forward passes of transformers.

The forward passes of Cohere and Granite are written here from their published
definitions, in float64 NumPy. Axes are named as in oracle.py; S is half of
a head's numbers.
"""

import numpy as np
import pytest

from palm_mtf.architecture.parameters import parameter_shapes
from palm_mtf.cli.main import main
from palm_mtf.errors import UserError
from palm_mtf.export.huggingface.config_json import (
  find_family,
  make_config,
  parse_config,
)
from palm_mtf.export.huggingface.tensor_files import WEIGHTS, TensorFiles
from palm_mtf.export.huggingface.weights import (
  check_tensors,
  import_parameters,
)
from tests import oracle
from tests.mtf_testing import random_tokens, small_config
from tests.transformers_folder import (
  EMBEDDING,
  FREQUENCIES,
  MODEL,
  NORM,
  UP,
  change_json,
  parameters,
  read_parts,
  set_tensors,
  tensors,
  write_parts,
  write_tensors,
)

EXACT = [
  {},
  {"attention": "multi_head"},
  {"final_norm_scale": "none"},
  {"block": "serial", "norm": "rms_norm"},
  {"block": "serial", "norm": "rms_norm", "attention": "multi_head"},
]


def _config_json(model) -> dict:
  return make_config(model, start_id=1, end_ids=[1], packing="joined")


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
  params = parameters(model)
  inputs = random_tokens(model, batch_size=2, seed=0)["inputs"]
  config = _config_json(model)
  is_cohere = config["architectures"] == ["CohereForCausalLM"]
  forward = _cohere if is_cohere else _granite
  actual = forward(config, tensors(model), inputs)
  expected = oracle.forward(model, params, inputs)
  assert np.abs(actual - expected).max() < 1e-6 * np.ptp(expected)


@pytest.mark.parametrize("changes", EXACT, ids=str)
def test_what_is_exported_is_imported_bit_for_bit(changes):
  model = small_config(**changes)
  params = parameters(model)
  described = parse_config(_config_json(model), "folder")
  family, again, packing, start_id, _ = described
  found = import_parameters(again, family, tensors(model).__getitem__)
  assert packing == "joined"
  assert start_id == 1
  assert parameter_shapes(again) == parameter_shapes(model)
  assert found.keys() == params.keys()
  for name, value in params.items():
    np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
  "changes", [{"norm": "rms_norm"}, {"block": "serial"}], ids=str
)
def test_a_model_that_transformers_does_not_have_is_refused(changes):
  with pytest.raises(UserError, match="no architecture of transformers"):
    find_family(small_config(**changes))


def _refused(folder) -> str:
  """Returns the error line for the tensors of a folder."""
  with pytest.raises(UserError) as error:
    check_tensors(TensorFiles(str(folder)), MODEL, find_family(MODEL), "there")
  assert len(str(error.value).splitlines()) == 1
  return str(error.value)


def test_a_tensor_that_is_missing_or_unknown_is_named(model_folder):
  path = model_folder / "model.safetensors"
  values = tensors(MODEL)
  bias = {"model.layers.0.mlp.up_proj.bias": np.zeros(36, np.float32)}
  write_tensors(path, {**values, **bias})
  assert "'model.layers.0.mlp.up_proj.bias' is (36,)" in _refused(model_folder)
  layer = {UP.replace("0", "7"): values[UP]}
  write_tensors(path, {**values, **layer})
  assert f"'{UP.replace('0', '7')}' is (36, 24)" in _refused(model_folder)
  write_tensors(path, {"a\nb": values[UP], **values})
  assert r"'a\nb' is (36, 24)" in _refused(model_folder)
  del values[UP]
  write_tensors(path, values)
  assert f"{UP} is missing" in _refused(model_folder)


def test_a_tensor_of_another_shape_is_named(model_folder):
  set_tensors(model_folder, **{NORM: np.ones(1, np.float32)})
  assert f"{NORM} is (1,); the model wants (24,)" in _refused(model_folder)


def test_an_lm_head_that_is_not_the_embedding_is_refused_by_name(model_folder):
  head = tensors(MODEL)[EMBEDDING].copy()
  head[-1, -1] = np.nextafter(head[-1, -1], np.float32(9))
  set_tensors(model_folder, **{"lm_head.weight": head})
  assert "lm_head.weight is not the embedding" in _refused(model_folder)
  set_tensors(model_folder, **{"lm_head.weight": head[1:]})
  assert "lm_head.weight' is (299, 24)" in _refused(model_folder)


def test_other_frequencies_of_the_rotary_embedding_are_refused(model_folder):
  ours = 10_000.0 ** (-np.arange(0, 10, 2) / 10)
  set_tensors(model_folder, **{FREQUENCIES: ours * [1, 1, 1, 1, 1.001]})
  assert f"{FREQUENCIES} is not the frequencies of rope_theta" in _refused(
    model_folder
  )
  set_tensors(model_folder, **{FREQUENCIES: ours[1:]})
  assert FREQUENCIES in _refused(model_folder)
  set_tensors(
    model_folder, **{FREQUENCIES.replace("1", "2"): ours}
  )  # of 2 layers
  assert FREQUENCIES.replace("1", "2") in _refused(model_folder)


DOWN = "model.layers.0.mlp.down_proj"
# {method: {end of a tensor's name: (type, shape)}} in place of DOWN's weight of
# [24, 40], as the method's program writes them
QUANTIZED = {
  "GPTQ": {
    "qweight": ("I32", [5, 24]),
    "qzeros": ("I32", [1, 3]),
    "scales": ("F16", [1, 24]),
    "g_idx": ("I32", [40]),
  },
  "AWQ": {
    "qweight": ("I32", [40, 3]),
    "qzeros": ("I32", [1, 3]),
    "scales": ("F16", [1, 24]),
  },
  "nf4": {
    "weight": ("U8", [480, 1]),
    "weight.absmax": ("U8", [15]),
    "weight.quant_map": ("F32", [16]),
    "weight.quant_state.bitsandbytes__nf4": ("U8", [80]),
  },
  "int8": {"weight": ("I8", [24, 40]), "SCB": ("F32", [24])},
  "int8 alone": {"weight": ("I8", [24, 40])},
  "FP8": {
    "weight": ("F8_E4M3", [24, 40]),
    "weight_scale": ("F32", [24, 1]),
    "input_scale": ("F32", [1]),
  },
  "FP8 in blocks": {
    "weight": ("F8_E4M3", [24, 40]),
    "weight_scale_inv": ("F32", [1, 1]),
  },
  "FP8 alone": {"weight": ("F8_E5M2", [24, 40])},
  "packed": {
    "weight_packed": ("I32", [24, 5]),
    "weight_scale": ("F16", [24, 1]),
    "weight_shape": ("I64", [2]),
  },
  "packed bytes": {"weight": ("U8", [24, 20])},
  "scaled": {"weight": ("F16", [24, 40]), "weight_scale": ("F32", [1])},
  "HQQ": {"W_q": ("U8", [480]), "scale": ("F16", [1]), "zero": ("F16", [1])},
}
BITS = {"I8": 8, "U8": 8, "F16": 16, "I32": 32, "F32": 32, "I64": 64}


@pytest.mark.parametrize("has_key", [True, False])
@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_called_so_with_the_fix(
  method, has_key, model_folder, tmp_path, capsys
):
  path = model_folder / WEIGHTS
  header, content = read_parts(path)
  del header[f"{DOWN}.weight"]
  kept = {name: x for name, x in header.items() if name != "__metadata__"}
  end, header, parts = 0, {}, []
  for name, x in kept.items():
    begin, stop = x["data_offsets"]
    parts.append(content[begin:stop])
    header[name] = {**x, "data_offsets": [end, end + stop - begin]}
    end += stop - begin
  for name, (dtype, shape) in QUANTIZED[method].items():
    size = int(np.prod(shape)) * BITS.get(dtype, 8) // 8
    parts.append(bytes(size))
    offsets = [end, end + size]
    described = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
    header[f"{DOWN}.{name}"] = described
    end += size
  write_parts(path, header, b"".join(parts))
  key = {"quantization_config": {"quant_method": "any"}} if has_key else {}
  change_json(model_folder / "config.json", **key)
  assert (
    main(["import", str(model_folder), "--output", str(tmp_path / "x")]) == 2
  )
  (line,) = capsys.readouterr().err.splitlines()
  assert "quantized" in line
  assert line.endswith("; give the original weights, or a GGUF file.")


@pytest.mark.parametrize("name", ["q_proj.bias", "up_proj.lora_A.weight"])
def test_a_bias_or_an_adapter_is_not_called_quantized(name, model_folder):
  name = f"model.layers.0.mlp.{name}".replace("mlp.q_", "self_attn.q_")
  set_tensors(model_folder, **{name: np.zeros(3, np.float32)})
  with pytest.raises(UserError, match="no such tensor"):
    check_tensors(
      TensorFiles(str(model_folder)), MODEL, find_family(MODEL), "folder"
    )
