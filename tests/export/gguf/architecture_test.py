# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tensors and metadata, run as llama.cpp runs them, give our logits."""

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.export.gguf.architecture import (
  gguf_architecture,
  gguf_name,
  model_metadata,
)
from palm_mtf.export.huggingface.config_json import COHERE
from palm_mtf.export.huggingface.weights import exported, tensor_shapes
from tests import oracle
from tests.export.gguf import llama_cpp_oracle
from tests.mtf_testing import random_tokens, small_config

WIDTH = {"d_model": 24, "num_heads": 3, "d_kv": 8}
SERIAL = {"block": "serial", "norm": "rms_norm"}
MODELS = [
  WIDTH,
  {**WIDTH, "attention": "multi_head"},
  {**WIDTH, "final_norm_scale": "none"},
  SERIAL,
  {**SERIAL, "attention": "multi_head", "num_heads": 5},
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_tensors_give_our_logits_in_the_architecture_named(changes):
  model = small_config(**changes)
  params = oracle.random_parameters(model, seed=1)
  tokens = random_tokens(model, batch_size=1, seed=0)["inputs"]
  read = exported(model, COHERE, params.__getitem__)
  tensors = {gguf_name(name): read(name) for name in tensor_shapes(model)}
  actual = llama_cpp_oracle.forward(model_metadata(model), tensors, tokens[0])
  expected = oracle.forward(model, params, tokens)[0]
  assert np.abs(actual - expected).max() < 1e-9 * np.ptp(expected)


@pytest.mark.parametrize(
  "changes, message",
  [
    ({"norm": "rms_norm"}, "^NORM = "),
    ({**WIDTH, "num_heads": 2}, r"^NUM_HEADS \* D_KV = 16 and D_MODEL = 24"),
    ({**WIDTH, "num_layers": 64}, "^NUM_LAYERS = 64: .*norms of q and k"),
  ],
)
def test_a_model_that_llama_cpp_would_run_otherwise_is_refused(
  changes, message
):
  with pytest.raises(UserError, match=message):
    gguf_architecture(small_config(**changes))


def test_a_serial_model_of_any_width_and_depth_is_a_granite():
  model = small_config(**SERIAL, num_layers=64)
  assert model.num_heads * model.d_kv != model.d_model
  assert gguf_architecture(model) == "granite"
