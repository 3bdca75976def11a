# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prefix tuning (Li and Liang 2021) and prompt tuning (Lester et al. 2021).

The float64 oracle of models (oracle.py) has each document in its own row, which
begins with the virtual positions. So it knows neither packed rows nor segments.
"""

from collections.abc import Mapping

import numpy as np

from tests import oracle
from tests.adapter_oracle import slopes_of
from tests.blocks import Z_LOSS, Case, block_config

KINDS = ("prefix", "prompt")
LENGTH = 3  # virtual positions


def virtual_shapes(config) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each parameter of the adapter, by name."""
  count, base = config.adapter_length, oracle.parameter_shapes(config.base)
  if config.adapter == "prompt":
    return {"virtual_embedding": (count, config.d_model)}
  return {
    f"{name}_virtual": (count, *shape[1:])
    for name, shape in base.items()
    if name.endswith(("attention/k", "attention/v"))
  }


def random_virtual(config, seed: int) -> dict[str, np.ndarray]:
  """Returns parameters of the adapter, float32."""
  rng = np.random.default_rng(seed)
  return {
    name: np.float32(rng.standard_normal(shape))
    for name, shape in virtual_shapes(config).items()
  }


def virtual_documents(config, batch_size: int, seed: int) -> dict:
  """Returns packed rows of random tokens, with segments and loss weights.

  A row holds two documents of 2 to 4 tokens, each after the virtual positions,
  and padding. Inputs of virtual positions are arbitrary, and have no targets.
  """
  rng = np.random.default_rng(seed)
  shape = [batch_size, config.sequence_length]
  inputs = rng.integers(config.vocab_size, size=shape, dtype=np.int32)
  targets, segments, weights = (np.zeros(shape, x) for x in "iif")
  for row in range(batch_size):
    end = 0
    for number in (1, 2):
      first, start = end, end + config.adapter_length
      end = start + rng.integers(2, 5)
      targets[row, start:end] = rng.integers(1, config.vocab_size, end - start)
      inputs[row, start:end] = [0, *targets[row, start : end - 1]]
      segments[row, first:end] = number
      weights[row, start:end] = rng.choice([0.5, 1], end - start)
  return {
    "inputs": inputs,
    "targets": np.int32(targets),
    "segments": np.int32(segments),
    "loss_weights": np.float32(weights),
  }


def forward(config, params, batch: Mapping[str, np.ndarray]) -> np.ndarray:
  """Returns the logits of each document by itself; zeros at padding."""
  inputs, segments = batch["inputs"], batch["segments"]
  logits = np.zeros([*inputs.shape, config.vocab_size])
  for row, number in np.ndindex(len(inputs), segments.max()):
    inside = segments[row] == number + 1
    own = inputs[row][inside][np.newaxis]
    logits[row, inside] = oracle.forward(config, params, own)[0]
  return logits


def make_case(block: str, kind: str, **settings) -> Case:
  """Returns a model with an adapter and a batch, with the oracle's numbers.

  `slopes` are those of the adapter. Logits count only where a token is read.
  """
  config = block_config(
    block,
    **{
      "adapter": kind,
      "adapter_length": LENGTH,
      "sequence_length": 2 * LENGTH + 9,
      **settings,
    },
  )
  own = random_virtual(config, seed=4)
  params = {**oracle.random_parameters(config.base, seed=1), **own}
  batch = virtual_documents(config, batch_size=2, seed=2)

  def losses(params):
    logits = forward(config, params, batch)
    given = batch["targets"], Z_LOSS, batch["loss_weights"]
    return oracle.loss_of_logits(logits, *given)

  slopes = slopes_of(losses, params, own)
  logits = forward(config, params, batch)
  return Case(config, params, batch, logits, losses(params), slopes, {})
