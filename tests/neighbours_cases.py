# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model with NEIGHBOURS and a batch, with the oracle's numbers."""

import numpy as np

from tests import neighbours_oracle, oracle
from tests.blocks import Z_LOSS, Case
from tests.mtf_testing import small_config

VARIANTS = {"plain": {}, "reading": {"NEIGHBOURS": 2}}
CONFIG = small_config(
  layers="plain, reading",
  variants=VARIANTS,
  num_layers=4,
  sequence_length=12,
  chunk_length=4,
  d_model=16,
  d_ff=20,
)


def make_batch(config, seed=0):
  """Returns two rows; some neighbours end early, and some are missing."""
  rng = np.random.default_rng(seed)
  m, length = config.chunk_length, config.sequence_length
  inputs, targets = rng.integers(1, 44, [2, 2, length], dtype=np.int32)
  found = rng.integers(0, 44, [2, length // m, 2, 2 * m], dtype=np.int32)
  found[0, 0, 1, 5:] = found[0, 1, 1] = found[1, 1] = -1
  return {
    "inputs": inputs,
    "targets": targets,
    "neighbours": found.reshape(2, -1),
  }


def make_case(config) -> Case:
  """Returns two rows of random tokens and neighbours."""
  params = neighbours_oracle.random_parameters(config, seed=1)
  batch = make_batch(config)

  def losses(params):
    given = batch["inputs"], batch["neighbours"]
    logits = neighbours_oracle.forward(config, params, *given)
    return oracle.loss_of_logits(logits, batch["targets"], Z_LOSS)

  rng, slopes = np.random.default_rng(3), {}
  for key, value in params.items():
    direction = rng.standard_normal(value.shape)
    step = 1e-5 / np.linalg.norm(direction)
    up, down = (
      sum(losses({**params, key: value + sign * step * direction}))
      for sign in (1, -1)
    )
    slopes[key] = direction, (up - down) / (2 * step)
  given = batch["inputs"], batch["neighbours"]
  logits = neighbours_oracle.forward(config, params, *given)
  return Case(config, params, batch, logits, losses(params), slopes, {})
