# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and PaLM's optimizer in JAX take the oracle's steps and ours.

Both programs start from the same weights and read the same batches, which are
rows of bytes from the source of Python's standard library. They compute in
float32 on the CPU.
"""

import dataclasses
import pathlib
import sysconfig
import types
from collections.abc import Iterator

import jax
import numpy as np
import pytest

from palm_mtf.config import ModelConfig
from tests.mtf_testing import relative_error
from tests.tools.peers.oracle_steps import initial_parameters, oracle_steps
from tools.bench.models import PALM_OPTIMIZER, training_program
from tools.peers import jax_peer

# Names of a block's weights in the JAX program, and in a checkpoint.
BLOCK_NAMES = {
  "scale": "norm/scale",
  "q": "attention/q",
  "k": "attention/k",
  "v": "attention/v",
  "o": "attention/o",
  "gate": "mlp/wi_gate",
  "up": "mlp/wi",
  "down": "mlp/wo",
}


def test_it_takes_the_oracle_s_steps():
  with jax.enable_x64(True):
    params = jax.tree.map(jax.numpy.asarray, initial_parameters())
    state = jax_peer.adafactor_init(params)
    for k, gradients, expected in oracle_steps():
      params, state = jax_peer.adafactor_step(
        params, state, gradients, *jax_peer.adafactor_schedule(k)
      )
      for name, value in params.items():
        assert relative_error(value, expected[name]) < 1e-12, (name, k)


def read_bytes() -> np.ndarray:
  """Returns the bytes of the standard library's modules, [bytes], uint8."""
  folder = pathlib.Path(sysconfig.get_paths()["stdlib"])
  text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
  return np.frombuffer(text, np.uint8)


def batches(
  config: ModelConfig, batch_size: int, steps: int, seed: int
) -> Iterator[dict[str, np.ndarray]]:
  """Yields inputs and targets, [batch_size, sequence_length] int32 each."""
  text = read_bytes()
  rng = np.random.default_rng(seed)
  for _ in range(steps):
    # A row may begin at any byte. Targets are the inputs one byte later.
    starts = rng.integers(len(text) - config.sequence_length, size=batch_size)
    rows = starts[:, np.newaxis] + np.arange(config.sequence_length + 1)
    tokens = text[rows].astype(np.int32)
    yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


def train_ours(
  config: ModelConfig, batch_size: int, steps: int, seed: int
) -> tuple[dict[str, np.ndarray], list[float]]:
  """Trains with palm_mtf; returns initial weights and the loss of each step."""
  from palm_mtf.runtime.client.client import Client
  from palm_mtf.training.step import TrainStep

  # The JAX program has no zero-centered norm scales.
  optimizer = dataclasses.replace(PALM_OPTIMIZER, norm_scale="plain")
  with training_program(
    config, optimizer, batch_size=batch_size, seed=seed
  ) as (session, program):
    weights = session.run(
      {n: parts[0].variable.value() for n, parts in program.slices.items()}
    )
    step = TrainStep(Client(session), program)
    losses = []
    for k, batch in enumerate(batches(config, batch_size, steps, seed)):
      metrics = step.run(batch, k)
      # The JAX program's loss includes the z-loss.
      losses.append(metrics["loss"] + metrics["z_loss"])
  return weights, losses


def jax_parameters(
  config: ModelConfig, weights: dict[str, np.ndarray]
) -> dict[str, object]:
  """Returns the JAX program's parameters from ours by name."""
  return {
    "embedding": weights["embedding"],
    "scale": weights["final_norm/scale"],
    "blocks": [
      {
        theirs: weights[f"layer_{layer:03d}/{ours}"]
        for theirs, ours in BLOCK_NAMES.items()
      }
      for layer in range(config.num_layers)
    ],
  }


def train_jax(
  config: ModelConfig,
  weights: dict[str, np.ndarray],
  batch_size: int,
  steps: int,
  seed: int,
) -> list[float]:
  """Trains with JAX from `weights`; returns the loss of every step."""
  # The flags of the JAX program that its `compute_loss` reads.
  sizes = types.SimpleNamespace(
    dtype="float32", d_kv=config.d_kv, d_model=config.d_model
  )

  @jax.jit
  def step(params, state, batch, beta2, learning_rate):
    loss, gradients = jax.value_and_grad(jax_peer.compute_loss)(
      params, batch["inputs"], batch["targets"], sizes
    )
    return loss, *jax_peer.adafactor_step(
      params, state, gradients, beta2, learning_rate
    )

  params = jax.tree.map(jax.numpy.asarray, jax_parameters(config, weights))
  state = jax_peer.adafactor_init(params)
  losses = []
  for k, batch in enumerate(batches(config, batch_size, steps, seed), 1):
    loss, params, state = step(
      params, state, batch, *jax_peer.adafactor_schedule(k)
    )
    losses.append(float(loss))
  return losses


@pytest.mark.slow
def test_two_hundred_steps_follow_an_independent_program():
  config = ModelConfig(
    num_layers=2,
    d_model=64,
    num_heads=4,
    d_kv=16,
    d_ff=256,
    vocab_size=256,  # a token is a byte
    sequence_length=64,
    activation_dtype="float32",
  )
  run = {"batch_size": 8, "steps": 200, "seed": 0}
  weights, ours = train_ours(config, **run)
  theirs = train_jax(config, weights, **run)
  # The first steps differ only by rounding; in later steps, Adafactor's
  # g / sqrt(v) amplifies rounding.
  np.testing.assert_allclose(ours[:10], theirs[:10], rtol=1e-5)
  np.testing.assert_allclose(ours, theirs, rtol=1e-3)
  assert ours[-1] < ours[0] - 2, "it learnt"
