# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The whole model against the oracles, and its invariances."""

import itertools
import json
import math
import pathlib

import numpy as np
import pytest

from palm_mtf._tf import mtf, tf
from palm_mtf.config import PalmConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.palm import Palm
from tests import oracle, oracle_jax
from tests.accounting.published_sizes import PALM_8B, PALM_62B, PALM_540B
from tests.mtf_testing import (
  LAYOUTS,
  mesh_layout,
  random_tokens,
  relative_error,
  run_model,
  small_config,
)

FORMS = [
  dict(norm=norm, block=block, attention=attention)
  for norm, block, attention in itertools.product(
    ["layer_norm", "rms_norm"],
    ["parallel", "serial"],
    ["multi_query", "multi_head"],
  )
]
FORM_NAMES = [" ".join(form.values()) for form in FORMS]
Z_LOSS = 0.1  # large, so that its gradient counts


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_float32_agrees_with_the_oracles_to_1e_5(form):
  config = small_config(**form)
  params = oracle.random_parameters(config, seed=1)
  tokens = random_tokens(config, batch_size=3, seed=2)
  result = run_model(config, params, tokens, z_loss=Z_LOSS)
  logits = oracle.forward(config, params, tokens["inputs"])
  loss, z_loss, gradients = oracle_jax.loss_and_gradients(
    config, params, tokens["inputs"], tokens["targets"], Z_LOSS
  )
  assert relative_error(result.logits, logits) < 1e-5
  assert result.loss == pytest.approx(loss, rel=1e-5)
  assert result.z_loss == pytest.approx(z_loss, rel=1e-5)
  assert result.gradients.keys() == gradients.keys()
  for name, gradient in gradients.items():
    assert relative_error(result.gradients[name], gradient) < 1e-5, name


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_bfloat16_agrees_with_the_oracles_to_its_8_bits(form):
  """One rounding is 2^-9 = 0.2%; some twenty meet on the way to a gradient."""
  config = small_config(activation_dtype="bfloat16", **form)
  params = oracle.random_parameters(config, seed=1)
  tokens = random_tokens(config, batch_size=3, seed=2)
  result = run_model(config, params, tokens, z_loss=Z_LOSS)
  logits = oracle.forward(config, params, tokens["inputs"])
  loss, z_loss, gradients = oracle_jax.loss_and_gradients(
    config, params, tokens["inputs"], tokens["targets"], Z_LOSS
  )
  assert relative_error(result.logits, logits) < 0.02
  assert result.loss == pytest.approx(loss, rel=0.01)
  assert result.z_loss == pytest.approx(z_loss, rel=0.01)
  for name, gradient in gradients.items():
    assert relative_error(result.gradients[name], gradient) < 0.05, name


@pytest.mark.parametrize("attention", ["multi_query", "multi_head"])
def test_future_tokens_do_not_change_past_logits(attention):
  config = small_config(attention=attention)
  params = oracle.random_parameters(config, seed=3)
  tokens = random_tokens(config, batch_size=2, seed=4)
  before = run_model(config, params, tokens).logits
  changed = {name: np.copy(value) for name, value in tokens.items()}
  changed["inputs"][:, 5:] = (changed["inputs"][:, 5:] + 7) % config.vocab_size
  after = run_model(config, params, changed).logits
  np.testing.assert_array_equal(after[:, :5], before[:, :5])
  assert np.all(np.any(after[:, 5:] != before[:, 5:], axis=-1))


@pytest.mark.parametrize(
  "block, attention", [("parallel", "multi_query"), ("serial", "multi_head")]
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_do_not_change_results(layout, block, attention):
  config = small_config(block=block, attention=attention)
  params = oracle.random_parameters(config, seed=5)
  tokens = random_tokens(config, batch_size=4, seed=6)
  single = run_model(config, params, tokens, z_loss=Z_LOSS)
  split = run_model(
    config, params, tokens, mesh=mesh_layout(layout), z_loss=Z_LOSS
  )
  assert relative_error(split.logits, single.logits) < 1e-6
  assert split.loss == pytest.approx(single.loss, rel=1e-6)
  assert split.z_loss == pytest.approx(single.z_loss, rel=1e-6)
  for name, gradient in single.gradients.items():
    # Only the order of float32 sums differs.
    assert relative_error(split.gradients[name], gradient) < 3e-6, name


def _variables(config: PalmConfig) -> dict[str, list[int]]:
  with tf.Graph().as_default():
    mesh = mtf.Mesh(mtf.Graph(), "mesh")
    dims = model_dims(config, batch_size=1)
    tokens = mtf.import_tf_tensor(
      mesh,
      tf.zeros([1, config.sequence_length], tf.int32),
      mtf.Shape([dims.batch, dims.length]),
    )
    Palm(mesh, config, dims, seed=0).logits(tokens)
    return {v.name: v.shape.to_integer_list for v in mesh.graph.all_variables}


# PaLM Table 1 prints 8.63, 62.50 and 540.35 billion; the exact counts follow
# from its sizes, the tied embedding once and without the norms' scales.
@pytest.mark.parametrize(
  "config, published",
  [
    (PALM_8B, 8_631_877_632),
    (PALM_62B, 62_495_129_600),
    (PALM_540B, 540_354_281_472),
  ],
  ids=["8B", "62B", "540B"],
)
def test_full_size_model_holds_exactly_the_published_parameters(
  config, published
):
  variables = _variables(config)
  scales = [s for name, s in variables.items() if name.endswith("/scale")]
  kernels = [s for name, s in variables.items() if not name.endswith("/scale")]
  assert sum(map(math.prod, kernels)) == published
  assert sum(map(math.prod, scales)) == (config.num_layers + 1) * config.d_model


@pytest.mark.parametrize("form", FORMS, ids=FORM_NAMES)
def test_variables_are_those_of_the_golden_file(form):
  """A renamed variable breaks checkpoints; then this file's diff shows it."""
  golden = pathlib.Path(__file__).with_name("palm_variables.json")
  key = f"{form['block']} {form['attention']}"
  variables = _variables(small_config(**form))
  assert variables == json.loads(golden.read_text())[key]
