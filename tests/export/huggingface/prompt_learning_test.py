# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix and prompt tuning go to PEFT, and come from it."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from palm_mtf.export.huggingface.config_json import find_family
from palm_mtf.export.huggingface.peft import make_peft, read_peft
from tests.adapted_models import describe
from tests.cases import slow
from tests.export.huggingface.families_test import exported_config
from tests.export.huggingface.peft_test import (
  CONFIG,
  FILE,
  assert_same_logits,
  logits_of,
  open_peer,
  write_base,
)
from tests.refusals import message_of
from tests.transformers_folder import parameters
from tests.virtual_oracle import KINDS, LENGTH, random_virtual

FAST = ("LLaMA 3", "GPT-2", "GPT-J")
CASES = (*FAST, "Qwen 3", "Gemma", "Gemma 3", "Mistral", "GPT-NeoX", "Granite")
NAMES = [slow(x, unless=x in FAST) for x in CASES]


def base_of(name):
  """Returns a model that has room for virtual positions and 8 tokens."""
  model = exported_config("LLaMA 3" if name == "Granite" else name)
  changes = {"embedding_scale": 2.0} if name == "Granite" else {}
  return dataclasses.replace(model, sequence_length=16, **changes)


def make(name, kind, folder):
  """Writes an adapter for PEFT; returns its model and parameters."""
  base = base_of(name)
  model = dataclasses.replace(base, adapter=kind, adapter_length=LENGTH)
  params = {**parameters(base), **random_virtual(model, seed=4)}
  make_peft(describe(model)).write(str(folder), params.__getitem__)
  return model, params


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_comes_back_bit_for_bit(name, kind, tmp_path):
  model, params = make(name, kind, tmp_path / "out")
  found = read_peft(str(tmp_path / "out"), model.base, params.__getitem__)
  assert found.base == "5eed" and found.model == model
  assert found.parameters.keys() == random_virtual(model, seed=4).keys()
  for key, value in found.parameters.items():
    np.testing.assert_allclose(
      value, params[key], rtol=1e-6 * (name == "Granite")
    )
  config = json.loads((tmp_path / "out" / CONFIG).read_text())
  (tensor,) = load_file(tmp_path / "out" / FILE).values()
  width = config["token_dim"] * (
    2 * config["num_layers"] if kind == "prefix" else 1
  )
  assert tensor.shape == (config["num_virtual_tokens"], width)


# {case: (changes of adapter_config.json, tensors by name, what is said)}
REFUSED = {
  "sizes": ({"token_dim": 8}, {}, "token_dim = 8: for this base it is 20;"),
  "layers": ({"num_layers": 3}, {}, "num_layers = 3: for this base it is 2;"),
  "two models": ({"num_transformer_submodules": 2}, {}, "it is 1; give"),
  "a task": ({"task_type": "SEQ_CLS"}, {}, "task_type = 'SEQ_CLS': for this"),
  "no length": ({"num_virtual_tokens": None}, {}, "num_virtual_tokens = None"),
  "a key": ({"modules_to_save": ["score"]}, {}, "does not know this key"),
  "more": ({}, {"classifier": np.zeros(3, np.float32)}, "its tensors are"),
  "fewer": ({"num_virtual_tokens": 2}, {}, "with this base they are"),
  "a list": ({"peft_type": ["PREFIX_TUNING"]}, {}, "reads only LORA"),
  "a method": ({"peft_type": "P_TUNING"}, {}, "reads only LORA, PREFIX_TUNING"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_adapter_of_another_base_is_refused(case, tmp_path):
  changes, tensors, said = REFUSED[case]
  model, params = make("LLaMA 3", "prefix", tmp_path / "out")
  path = tmp_path / "out" / CONFIG
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
  held = load_file(tmp_path / "out" / FILE) | tensors
  save_file(held, tmp_path / "out" / FILE)
  given = str(tmp_path / "out"), model.base, params.__getitem__
  message = message_of(read_peft, *given)
  assert said in message and message.startswith(f"{tmp_path / 'out'}/")


@pytest.mark.peers
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CASES)
def test_peft_computes_our_logits_of_an_adapter(name, kind, tmp_path):
  import peft

  model, params = make(name, kind, tmp_path / "adapter")
  peer = open_peer(write_base(tmp_path / "base", model.base, params))
  plain = logits_of(peer)[1]
  peer = peft.PeftModel.from_pretrained(peer, tmp_path / "adapter")
  assert_same_logits(model, params, peer, LENGTH)
  assert np.abs(logits_of(peer)[1][:, -8:] - plain).max() > 0.01 * np.ptp(plain)


# {case: (model, class of peft, settings)}
MADE = {
  "prefix": ("LLaMA 3", "PrefixTuningConfig", {}),
  "projected prefix": (
    "GPT-2",
    "PrefixTuningConfig",
    {"prefix_projection": True, "encoder_hidden_size": 12},
  ),
  "prompt": ("GPT-2", "PromptTuningConfig", {}),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", MADE)
def test_an_adapter_of_peft_has_its_logits_here(name, tmp_path):
  import peft
  import torch

  kind, made, settings = MADE[name]
  model = base_of(kind)
  params = parameters(model)
  peer = open_peer(write_base(tmp_path / "base", model, params))
  torch.manual_seed(0)
  config = getattr(peft, made)(
    task_type="CAUSAL_LM", num_virtual_tokens=LENGTH, **settings
  )
  peer = peft.get_peft_model(peer, config).eval()
  peer.save_pretrained(tmp_path / "adapter")
  found = read_peft(str(tmp_path / "adapter"), model, params.__getitem__)
  assert find_family(found.model.base) == find_family(model)
  assert_same_logits(found.model, {**params, **found.parameters}, peer, LENGTH)
