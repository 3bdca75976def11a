# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Adapters go to PEFT, and come from it."""

import json
import math
import re
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from palm_mtf.adapters.merge import merged_reader
from palm_mtf.export.huggingface.config_json import find_family, make_config
from palm_mtf.export.huggingface.peft import make_peft, read_peft
from palm_mtf.export.huggingface.tensor_files import WEIGHTS
from palm_mtf.export.huggingface.weights import (
  find_tensor_shapes,
  make_tensor_reader,
)
from tests import adapter_oracle, oracle
from tests.adapted_models import EVERY, KINDS, adapt, describe
from tests.cases import slow
from tests.export.huggingface.families_test import exported_config
from tests.refusals import message_of
from tests.transformers_folder import parameters, write_tensors

FILE, CONFIG = "adapter_model.safetensors", "adapter_config.json"
# {name of a case: (model, last words of adapted kernels)}
CASES = {
  "LLaMA": ("LLaMA", EVERY),
  "LLaMA 3, without k": ("LLaMA 3", ("q", "v", "wi")),
  "Qwen 3": ("Qwen 3", EVERY),
  "Gemma": ("Gemma", EVERY),
  "GPT-2": ("GPT-2", EVERY),
  "GPT-2, attention's o": ("GPT-2", ("q", "v", "o")),
  "GPT-J": ("GPT-J", EVERY),
  "GPT-NeoX": ("GPT-NeoX", EVERY),
  "GPT-NeoX, k": ("GPT-NeoX", ("k", "wo")),
  "Phi": ("Phi", EVERY),
  "Qwen 3, dense layers": ("Qwen 3, dense layers", ("q", "k", "v", "o")),
}
FAST = ("LLaMA 3, without k", "GPT-2", "GPT-NeoX")
NAMES = [slow(x, unless=x in FAST) for x in CASES]


def make(name, kind, folder):
  """Writes an adapter for PEFT; returns its model, parameters and class."""
  kind_of_model, words = CASES[name]
  model, params = adapt(exported_config(kind_of_model), kind, words)
  make_peft(describe(model)).write(str(folder), params.__getitem__)
  return model, params, find_family(model.base)


def read_folder(folder):
  """Returns the configuration, and {module: {kind: tensor}}."""
  config, found = json.loads((folder / CONFIG).read_text()), {}
  for tensor, value in load_file(folder / FILE).items():
    module, kind = re.fullmatch(
      r"base_model\.model\.(.+)\.(lora_A|lora_B|lora_magnitude_vector)"
      r"(?:\.weight)?",
      tensor,
    ).groups()
    found.setdefault(module, {})[kind] = value
  return config, found


def scale_of(config, module):
  """Returns the factor of a module's product, as PEFT's documentation says."""

  def find(patterns, default):
    found = (y for x, y in patterns.items() if f".{module}".endswith(f".{x}"))
    return next(found, default)

  rank = find(config["rank_pattern"], config["r"])
  alpha = find(config["alpha_pattern"], config["lora_alpha"])
  return alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def change(weight, tensors, config, scale):
  """Returns the weight of a module of torch with its adapter, in float64."""
  w = np.float64(weight.T if config["fan_in_fan_out"] else weight)
  w = w + scale * np.float64(tensors["lora_B"]) @ tensors["lora_A"]
  if config["use_dora"]:
    w *= (tensors["lora_magnitude_vector"] / np.linalg.norm(w, axis=1))[:, None]
  return w.T if config["fan_in_fan_out"] else w


def tensors_of(model, family, params):
  """Returns the tensors of a whole model, by their names in transformers."""
  read = make_tensor_reader(model, family, params.__getitem__)
  return {name: read(name) for name in find_tensor_shapes(model, family)}


def torch_modules(family, model):
  """Returns the names of all modules with weights."""
  names = find_tensor_shapes(model.base, family)
  return [x.removesuffix(".weight") for x in names if x.endswith(".weight")]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_the_factors_make_the_merged_model(name, kind, tmp_path):
  """In each module of the class, also where it joins q, k and v."""
  model, params, family = make(name, kind, tmp_path / "out")
  config, modules = read_folder(tmp_path / "out")
  base = tensors_of(model.base, family, params)
  merged = adapter_oracle.merge(model, params)
  wanted = tensors_of(model.base, family, merged)
  for tensor, value in base.items():
    module = tensor.removesuffix(".weight")
    if module in modules:
      value = change(value, modules[module], config, scale_of(config, module))
    np.testing.assert_allclose(value, wanted[tensor], 1e-5, 1e-6)
  assert modules
  ends = tuple(f".{x}" for x in config["target_modules"])
  chosen = {x for x in torch_modules(family, model) if f".{x}".endswith(ends)}
  assert chosen == {*modules}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_comes_back_bit_for_bit(name, kind, tmp_path):
  model, params, _ = make(name, kind, tmp_path / "out")
  found = read_peft(str(tmp_path / "out"), model.base, params.__getitem__)
  assert found.base == "5eed"
  again, settings = found.model, found.model.macros()
  own = {x for x in params if adapter_oracle.is_factor(x)}
  more = found.parameters.keys() - own
  assert own <= found.parameters.keys()
  for key in own:
    np.testing.assert_array_equal(found.parameters[key], params[key])
  # A module that joins kernels adapts all of them: the others by zeros.
  assert all(
    not found.parameters[x].any() for x in more if x.endswith("_lora_b")
  )
  targets = {*again.adapter_targets}
  assert targets >= {*model.adapter_targets}
  settings.pop("ADAPTER_TARGETS")
  wanted = model.macros()
  wanted.pop("ADAPTER_TARGETS")
  assert settings == wanted


def test_kernels_that_peft_takes_for_those_of_experts_are_refused():
  """PEFT 0.21.2 converts every name that ends as those of experts once did."""
  model, _ = adapt(exported_config("Qwen 3, dense layers"), "lora", ("wi",))
  message = message_of(make_peft, describe(model))
  assert message.startswith("ADAPTER_TARGETS = ['mlp/wi']: PEFT takes kernels")


PATTERNS = {
  "rank_pattern": {"layers.0.self_attn.q_proj": 5, "v_proj": 2},
  "alpha_pattern": {r"layers\.1\..*": 7.5},
}


def test_each_module_may_have_a_rank_and_an_alpha(tmp_path):
  """The factors in the file are drawn here, with other ranks than r."""
  model = exported_config("LLaMA 3")
  params, family = parameters(model), find_family(model)
  base = tensors_of(model, family, params)
  rng, tensors, wanted = np.random.default_rng(1), {}, dict(base)
  # {module: (rank, alpha)}, by PATTERNS; the others have no factors
  ranks = {
    "layers.0.self_attn.q_proj": (5, 4),
    "layers.1.self_attn.q_proj": (3, 7.5),
    "layers.0.self_attn.v_proj": (2, 4),
    "layers.1.mlp.up_proj": (3, 7.5),
  }
  for module, (rank, alpha) in ranks.items():
    weight = base[f"model.{module}.weight"]
    a = rng.standard_normal([rank, weight.shape[1]], np.float32)
    b = rng.standard_normal([weight.shape[0], rank], np.float32)
    tensors[f"base_model.model.model.{module}.lora_A.weight"] = a
    tensors[f"base_model.model.model.{module}.lora_B.weight"] = b
    wanted[f"model.{module}.weight"] = weight + alpha / rank * b @ a
  config = {"peft_type": "LORA", "r": 3, "lora_alpha": 4, **PATTERNS}
  (tmp_path / CONFIG).write_text(json.dumps(config))
  save_file(tensors, tmp_path / FILE)
  found = read_peft(str(tmp_path), model, params.__getitem__)
  read = merged_reader(found.model, {**params, **found.parameters}.__getitem__)
  merged = {name: read(name) for name in params}
  for tensor, value in tensors_of(model, family, merged).items():
    np.testing.assert_allclose(value, wanted[tensor], 1e-5, 1e-5)


# {what is wrong: (changes of adapter_config.json, tensors, start of a message)}
Q = "base_model.model.model.layers.0.self_attn.q_proj"
SETTINGS = {
  "peft_type": "'IA3': palm_mtf reads only LORA",
  "lora_alpha": "lora_alpha is missing",
  "r": "r is missing",
  "use_dora": "'yes': give true or false",
  "rank_pattern": "'(' is no regular expression",
  "alpha_pattern": "is no JSON object",
  "target_parameters": "kernels of experts have no adapters",
  "modules_to_save": "it replaces whole modules",
  "lora_bias": "its factors have biases",
  "layer_replication": "it repeats layers",
  "trainable_token_indices": "it changes rows of the embedding",
  "alora_invocation_tokens": "it begins in the middle of a text",
  "bias": "it changes biases of the base",
  "init_lora_weights": "the base changed when its factors were drawn",
  "use_qalora": "palm_mtf does not know this key",
}
VALUES = {
  "peft_type": "IA3",
  "lora_alpha": None,
  "r": None,
  "use_dora": "yes",
  "rank_pattern": {"(": 3},
  "alpha_pattern": [2],
  "layer_replication": [[0, 2]],
  "alora_invocation_tokens": [1, 2],
  "bias": "lora_only",
  "init_lora_weights": "pissa_niter_4",
  "lora_bias": True,
}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
  """Returns the folder of an adapter, and its base."""
  folder = tmp_path_factory.mktemp("peft") / "out"
  model, params, _ = make("LLaMA", "lora", folder)
  return folder, model.base, params


def refuse(written, folder, changes=None, tensors=None):
  """Returns the message for the adapter with changes; None removes a tensor."""
  source, base, params = written
  config = json.loads((source / CONFIG).read_text()) | (changes or {})
  (folder / CONFIG).write_text(json.dumps(config))
  values = {**load_file(source / FILE), **(tensors or {})}
  save_file({x: y for x, y in values.items() if y is not None}, folder / FILE)
  return message_of(read_peft, str(folder), base, params.__getitem__)


@pytest.mark.parametrize("key", SETTINGS)
def test_a_setting_that_is_not_computed_is_refused(key, written, tmp_path):
  message = refuse(written, tmp_path, {key: VALUES.get(key, ["lm_head"])})
  assert message.startswith(f"{tmp_path / CONFIG}: {key}")
  assert SETTINGS[key] in message


@pytest.mark.parametrize(
  "pattern",
  [
    "(a|a?)+x",
    ".*.*.*.*x",
    "a?" * 25 + "a" * 25,
    "(.|..)" * 25 + "x",
  ],
)
def test_no_pattern_stops_a_server(pattern, written, tmp_path):
  """Some take longer than the age of the universe, with Python's lock held."""
  message = refuse(written, tmp_path, {"rank_pattern": {pattern: 3}})
  assert "could take forever to match" in message


@pytest.mark.parametrize(
  "pattern",
  [
    r".*layers\.(0|1|2|3|4|5|6|7)\.(self_attn|mlp)\..*(q|k|v)_proj",
    r"(?!.*\.mlp\.).*q_proj",
  ],
)
def test_usual_patterns_are_read(pattern, written, tmp_path):
  source, base, params = written
  shutil.copytree(source, tmp_path, dirs_exist_ok=True)
  config = json.loads((tmp_path / CONFIG).read_text())
  config |= {"rank_pattern": {pattern: 3}}
  (tmp_path / CONFIG).write_text(json.dumps(config))
  read_peft(str(tmp_path), base, params.__getitem__)


TENSORS = {
  f"{Q}.lora_A.weight": (None, "is missing"),
  f"{Q}.lora_B.weight": ([24, 2], "is [24, 2]; with this base and its rank"),
  f"{Q}.lora_B.bias": ([24], "is no factor of a kernel"),
  f"{Q}.lora_magnitude_vector": ([24], "is no factor of a kernel"),
  f"{Q}x.lora_A.weight": (
    [3, 24],
    'did you mean "model.layers.0.self',
  ),
  "base_model.model.lm_head.lora_A.weight": ([3, 24], "is no factor"),
  "base_model.model.model.embed_tokens.lora_embedding_A": (
    [3, 44],
    "is no factor",
  ),
}


@pytest.mark.parametrize("tensor", TENSORS)
def test_every_tensor_is_used_or_named(tensor, written, tmp_path):
  shape, said = TENSORS[tensor]
  value = None if shape is None else np.ones(shape, np.float32)
  message = refuse(written, tmp_path, tensors={tensor: value})
  assert message.startswith(f"{tmp_path / FILE}: ")
  assert tensor[:40] in message and said in message


def test_an_adapter_without_tensors_is_refused(written, tmp_path):
  none = dict.fromkeys(load_file(written[0] / FILE))
  assert "has no tensors" in refuse(written, tmp_path, tensors=none)


def test_magnitudes_that_are_missing_are_named(written, tmp_path):
  message = refuse(written, tmp_path, {"use_dora": True})
  assert "lora_magnitude_vector is missing" in message


def write_base(folder, model, params):
  """Writes a model in the format of transformers."""
  config = make_config(model, start_id=1, end_ids=[1], packing="joined")
  folder.mkdir()
  (folder / "config.json").write_text(json.dumps(config))
  tensors = tensors_of(model, find_family(model), params)
  write_tensors(folder / WEIGHTS, tensors)
  return folder


def open_peer(folder):
  import transformers

  peer = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
  if hasattr(peer.config, "num_experts"):  # others want rows of 16 bytes
    peer.set_experts_implementation("eager")
  return peer


def logits_of(peer):
  """Returns tokens, and the logits of a model of torch in float32."""
  import torch

  tokens = np.random.default_rng(1).integers(44, size=[2, 8])
  with torch.no_grad():
    return tokens, peer(torch.tensor(tokens)).logits.numpy()


def assert_same_logits(model, params, peer, virtual=0):
  """Asserts that the peer computes the oracle's logits of the tokens."""
  tokens, theirs = logits_of(peer)
  params = {name: np.float64(x) for name, x in params.items()}
  ours = oracle.forward(model, params, np.pad(tokens, [[0, 0], [virtual, 0]]))
  ours, theirs = (x[:, -tokens.shape[1] :] for x in (ours, theirs))
  error = np.abs(ours - theirs).max() / np.ptp(ours)
  print(f"largest difference / range: {error:.1e}")
  assert error < 1e-4


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_peft_computes_our_logits_of_an_adapter(name, kind, tmp_path, recwarn):
  import peft

  model, params, _ = make(name, kind, tmp_path / "adapter")
  peer = open_peer(write_base(tmp_path / "base", model.base, params))
  plain = logits_of(peer)[1]
  peer = peft.PeftModel.from_pretrained(peer, tmp_path / "adapter")
  assert not [x for x in recwarn if "adapter" in str(x.message)]
  assert_same_logits(model.base, adapter_oracle.merge(model, params), peer)
  assert np.abs(logits_of(peer)[1] - plain).max() > 0.01 * np.ptp(plain)


# {case: (model, settings of peft.LoraConfig)}
MADE = {
  "all linear modules": ("LLaMA", {"target_modules": "all-linear"}),
  "rank-stabilized": (
    "Qwen 3",
    {"target_modules": ["q_proj", "down_proj"], "use_rslora": True},
  ),
  "patterns": (
    "LLaMA 3",
    {
      "target_modules": ["q_proj", "k_proj", "o_proj"],
      "rank_pattern": {"k_proj": 2, r"layers\.1\.self_attn\.q_proj": 7},
      "alpha_pattern": {"o_proj": 3},
    },
  ),
  "one layer": (
    "Gemma",
    {"target_modules": r".*\.1\..*_proj", "exclude_modules": ["v_proj"]},
  ),
  "layers_to_transform": (
    "LLaMA",
    {"target_modules": ["up_proj"], "layers_to_transform": [1]},
  ),
  "dora": ("LLaMA", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
  "dora in one layer": (
    "LLaMA 3",
    {
      "target_modules": ["k_proj", "down_proj"],
      "layers_to_transform": 0,
      "use_dora": True,
      "use_rslora": True,
    },
  ),
  "joined": ("GPT-NeoX", {"target_modules": ["query_key_value", "dense"]}),
  "joined, dora": (
    "GPT-NeoX",
    {"target_modules": ["query_key_value"], "use_dora": True},
  ),
  "Conv1D": ("GPT-2", {"target_modules": ["c_attn", "c_proj"]}),
  "Conv1D, dora": ("GPT-2", {"target_modules": ["c_attn"], "use_dora": True}),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", MADE)
def test_an_adapter_of_peft_has_its_logits_here(name, tmp_path):
  import peft
  import torch

  kind, settings = MADE[name]
  model = exported_config(kind)
  params = parameters(model)
  config = peft.LoraConfig(
    **{"r": 4, "lora_alpha": 6, "task_type": "CAUSAL_LM", **settings},
    init_lora_weights=False,
  )
  peer = open_peer(write_base(tmp_path / "base", model, params))
  peer = peft.get_peft_model(peer, config).eval()
  torch.manual_seed(0)
  for key, value in peer.named_parameters():
    if "lora_magnitude" in key:
      value.data *= 0.5 + torch.rand_like(value)
    elif "lora_" in key:
      value.data = 0.3 * torch.randn_like(value)
  peer.save_pretrained(tmp_path / "adapter")
  found = read_peft(str(tmp_path / "adapter"), model, params.__getitem__)
  read = merged_reader(found.model, {**params, **found.parameters}.__getitem__)
  assert_same_logits(model.base, {name: read(name) for name in params}, peer)


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
def test_peft_writes_what_it_read_bit_for_bit(kind, tmp_path):
  import peft

  model, params, _ = make("LLaMA 3, without k", kind, tmp_path / "one")
  peer = open_peer(write_base(tmp_path / "base", model.base, params))
  peer = peft.PeftModel.from_pretrained(peer, tmp_path / "one")
  peer.save_pretrained(tmp_path / "two")
  found = read_peft(str(tmp_path / "two"), model.base, params.__getitem__)
  assert found.model == model
  for key, value in found.parameters.items():
    np.testing.assert_array_equal(value, params[key])
