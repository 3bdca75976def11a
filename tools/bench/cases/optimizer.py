# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the optimizer's share of a training step.

  python -m tools.bench optimizer
  python -m tools.bench optimizer --gin.SECOND_MOMENT='"factored"' --json

--gin_file and --gin.NAME=VALUE are the flags of `palm_mtf train`.
"""

# A whole step, and the same step up to the global norm of the gradients, take
# turns in one process, on one random batch of the recipe's size. The share is
# the difference of their times divided by the time of the whole step; the
# median over --rounds pairs is printed with the quartiles. On a busy machine
# use the CPU seconds of the process, because the clock means nothing there.

import argparse
import statistics
import time
from collections.abc import Iterator

import numpy as np

from palm_mtf.config import Config
from tools.bench.command import Flag, train_config
from tools.bench.models import random_tokens, training_program

WARM_UP_STEPS = 3  # not timed: the first compiles, the others fill caches
RECIPE = "recipes/quickstart.gin"
HEAD = "       optimizer's share  quartiles        step"
FLAGS = {"--rounds": Flag(20, "timed pairs of steps")}


def time_pairs(config: Config, rounds: int) -> dict[str, list]:
  """Returns [rounds] pairs of seconds, for whole steps and for gradients."""
  model, mesh = config.model, config.mesh_layout
  batch_size = config.run.batch_sizes.sizes[0] // mesh.num_microbatches
  tokens = random_tokens(model, batch_size)
  with training_program(
    model, config.optimizer, batch_size=batch_size, mesh_layout=mesh
  ) as (session, program):
    feeds = [*program.pods[0].features.values(), program.step]
    norm = program.metrics["grad_norm"]
    # TensorFlow runs only the operations that a fetch needs. The norm needs
    # every gradient, but no operation of the update.
    calls = [
      session.make_callable([norm, program.update], feeds),
      session.make_callable(norm, feeds),
    ]
    times = []
    for step in range(WARM_UP_STEPS + rounds):
      for call in calls:
        start = np.array([time.perf_counter(), time.process_time()])
        call(tokens, tokens, step)
        times.append([time.perf_counter(), time.process_time()] - start)
  # Calls alternate: [2 * rounds, 2] becomes two arrays of [rounds, 2].
  clock, cpu = np.array(times[2 * WARM_UP_STEPS :]).T.reshape(2, -1, 2)
  return {"clock": clock.tolist(), "cpu": cpu.tolist()}


def summarize(pairs: list[tuple[float, float]]) -> dict[str, float]:
  """Returns the median share, its quartiles, and the median step seconds.

  Example:
    [(2, 1), (2, 1.5), (2, 1.8)] has the shares 0.5, 0.25 and 0.1.
  """
  shares = [(whole - gradients) / whole for whole, gradients in pairs]
  low, middle, high = np.percentile(shares, [25, 50, 75])
  return {
    "optimizer_share": round(float(middle), 4),
    "lower_quartile": round(float(low), 4),
    "upper_quartile": round(float(high), 4),
    "step_secs": round(statistics.median(whole for whole, _ in pairs), 5),
  }


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields one record with the shares by clock and by CPU seconds."""
  config = train_config(**chosen.gin, defaults=["NUM_MICROBATCHES=1"])
  seconds = time_pairs(config, chosen.rounds)
  records = {by: summarize(pairs) for by, pairs in seconds.items()}
  yield {**records, "rounds": chosen.rounds}


def row(record: dict) -> str:
  """Returns a line per way of timing."""
  return "\n".join(
    f"{by:<6} {record[by]['optimizer_share']:>17.1%}  "
    f"{record[by]['lower_quartile']:.1%} to "
    f"{record[by]['upper_quartile']:.1%}  {record[by]['step_secs']:.3f} s"
    for by in ("clock", "cpu")
  )
