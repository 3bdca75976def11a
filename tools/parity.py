# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the learning curves of palm_mtf and of an independent JAX program.

  python -m tools.parity
  python -m tools.parity --d_model=256 --num_layers=4

Prints a JSON object, and exits with 1 if the losses differ. Needs the packages
of the extra `test`.
"""

# Both programs start from the same weights and read the same batches, which are
# rows of bytes from the source of Python's standard library. They compute in
# float32 on the CPU. The JAX model and its optimizer are in
# tools/peers/jax_peer.py.

import argparse
import dataclasses
import json
import pathlib
import sys
import sysconfig
import types
from collections.abc import Iterator, Sequence

import numpy as np

from palm_mtf.config import ModelConfig
from palm_mtf.errors import check_count
from tools.bench.command import one_line_errors
from tools.bench.models import PALM_OPTIMIZER, training_program

# Largest relative differences of the losses. The first steps differ only by
# rounding; in later steps, Adafactor's g / sqrt(v) amplifies rounding.
FIRST_STEPS = 10
FIRST_LIMIT = 1e-5
LIMIT = 1e-3
SIZES = {
  "num_layers": 2,
  "d_model": 128,
  "num_heads": 4,
  "d_kv": 32,
  "d_ff": 512,
  "sequence_length": 128,
}
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
  import jax

  from tools.peers import jax_peer

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


def compare(ours: Sequence[float], theirs: Sequence[float]) -> dict:
  """Returns the largest relative differences, and whether they agree."""
  ours, theirs = np.array(ours), np.array(theirs)
  # A loss that is infinite or NaN counts as an infinite difference.
  with np.errstate(invalid="ignore"):
    differences = np.abs(ours - theirs) / np.abs(theirs)
  differences[~np.isfinite(differences)] = np.inf
  first, largest = differences[:FIRST_STEPS].max(), differences.max()
  return {
    "steps": len(ours),
    "first_loss": round(float(ours[0]), 6),
    "last_loss": round(float(ours[-1]), 6),
    "jax_last_loss": round(float(theirs[-1]), 6),
    "first_difference": float(f"{first:.3g}"),
    "largest_difference": float(f"{largest:.3g}"),
    "agrees": bool(first <= FIRST_LIMIT and largest <= LIMIT),
  }


@one_line_errors
def main(arguments: Sequence[str] | None = None) -> int:
  """Prints a record; returns the exit code, 0 if the curves agree."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  counts = {**SIZES, "batch_size": 8, "steps": 200}
  for name, size in counts.items():
    parser.add_argument(f"--{name}", type=int, default=size)
  parser.add_argument("--seed", type=int, default=0)
  chosen = parser.parse_args(arguments)
  for name in counts:
    check_count(f"--{name}", getattr(chosen, name))
  config = ModelConfig(
    vocab_size=256,  # a token is a byte
    activation_dtype="float32",
    **{name: getattr(chosen, name) for name in SIZES},
  )
  run = chosen.batch_size, chosen.steps, chosen.seed
  weights, ours = train_ours(config, *run)
  theirs = train_jax(config, weights, *run)
  record = compare(ours, theirs)
  print(json.dumps(record))
  return 0 if record["agrees"] else 1


if __name__ == "__main__":
  sys.exit(main())
