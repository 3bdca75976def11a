# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Blocks of other models equal the float64 oracle, in every layout."""

import numpy as np
import pytest

from tests import oracle
from tests.blocks import SETTINGS, block_config, fast_only
from tests.mtf_testing import (
  mesh_layout,
  random_documents,
  random_tokens,
  relative_error,
  run_model,
  without_compiler,
)

Z_LOSS = 0.1  # large, so that its gradient counts


def losses(config, params, batch):
  """Returns the oracle's loss, the sum of both terms."""
  return sum(
    oracle.loss(
      config,
      params,
      batch["inputs"],
      batch["targets"],
      Z_LOSS,
      batch.get("segments"),
      batch.get("loss_weights"),
    )
  )


def check(config, batch, seed, **how):
  """Compares logits and loss, and gradients along a random direction."""
  params = oracle.random_parameters(config, seed)
  result = run_model(config, params, batch, z_loss=Z_LOSS, **how)
  logits = oracle.forward(
    config, params, batch["inputs"], batch.get("segments")
  )
  assert relative_error(result.logits, logits) < 1e-5
  loss = losses(config, params, batch)
  assert result.loss + result.z_loss == pytest.approx(loss, rel=1e-5)
  assert result.gradients.keys() == params.keys()
  rng = np.random.default_rng(seed + 1)
  for name, value in params.items():
    # Central differences in float64 are exact to about 1e-9.
    direction = rng.standard_normal(value.shape)
    step = 1e-5
    up, down = (
      losses(config, {**params, name: value + s * step * direction}, batch)
      for s in (1, -1)
    )
    slope = (up - down) / (2 * step)
    gradient = result.gradients[name].astype(float)
    size = np.linalg.norm(gradient) * np.linalg.norm(direction)
    error = abs(np.sum(gradient * direction) - slope)
    # Without rotation, the gradient of k's bias is 0 except for rounding.
    assert error < 1e-5 * size + 1e-6, name


@pytest.mark.parametrize("name", SETTINGS)
def test_logits_and_gradients_equal_the_oracle_s(name):
  config = block_config(name)
  check(config, random_tokens(config, batch_size=2, seed=2), seed=1)


@pytest.mark.parametrize("name", ["LLaMA 3", "Gemma", "GPT-2", "Phi"])
def test_devices_without_cpp_operations_compute_the_same(name, monkeypatch):
  without_compiler(monkeypatch)
  config = block_config(name)
  batch = random_documents(config, batch_size=2, seed=3)
  check(config, batch, seed=2)


@pytest.mark.parametrize(
  "name", fast_only("GPT-2", "Transformer-XL in groups", "LaMDA")
)
def test_documents_of_a_row_do_not_see_each_other(name):
  """Learned positions count from the start of each document."""
  config = block_config(name)
  check(config, random_documents(config, batch_size=2, seed=4), seed=3)


@pytest.mark.parametrize(
  "layout",
  [
    pytest.param("all over data and model", marks=pytest.mark.slow),
    "PaLM's 2D",
  ],
)
@pytest.mark.parametrize("name", fast_only("LLaMA 3"))
def test_layouts_change_nothing(name, layout):
  config = block_config(name)
  batch = random_documents(config, batch_size=4, seed=5)
  check(config, batch, seed=4, mesh=mesh_layout(layout))
