# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the optimizer's share of a training step.

  python tools/bench_optimizer.py
  python tools/bench_optimizer.py --gin.SECOND_MOMENT='"factored"' --json

--gin_file and --gin.NAME=VALUE are those of `palm_mtf train`. Results are on
stdout.
"""

# A whole step and the same step up to the gradients' global norm take turns in
# one process, on one random batch of the recipe's size. The share is the
# difference of their times over the time of the whole step; the median over
# --rounds pairs is printed, with the quartiles. On a busy machine the CPU
# seconds of the process mean something, and the clock does not.

import argparse
import json
import statistics
import sys
import time

import numpy as np
from bench_command import (
  one_line_errors,
  random_tokens,
  read_gin_arguments,
  train_config,
)
from bench_program import training_program

from palm_mtf.config import Config
from palm_mtf.errors import check_count

WARM_UP_STEPS = 3  # not timed: the first compiles, the others fill caches
RECIPE = "recipes/quickstart.gin"


def seconds_of_pairs(config: Config, rounds: int) -> dict[str, list]:
  """Returns [rounds] pairs of seconds: of whole steps, and of gradients."""
  model, mesh = config.model, config.mesh_layout
  batch_size = config.run.batch_sizes.sizes[0] // mesh.num_microbatches
  tokens = random_tokens(model, batch_size)
  with training_program(
    model, config.optimizer, batch_size=batch_size, mesh_layout=mesh
  ) as (session, program):
    feeds = [*program.pods[0].features.values(), program.step]
    norm = program.metrics["grad_norm"]
    # TensorFlow runs what a fetch needs: the norm needs every gradient, and
    # nothing of the update.
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


@one_line_errors
def main() -> None:
  """Measures, and prints both shares."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  rounds_help = "timed pairs of steps"
  parser.add_argument("--rounds", type=int, default=20, help=rounds_help)
  chosen, macros = read_gin_arguments(parser, RECIPE)
  check_count("--rounds", chosen.rounds)
  files = chosen.gin_file or [RECIPE]
  config = train_config(files, ["NUM_MICROBATCHES=1", *macros])
  seconds = seconds_of_pairs(config, chosen.rounds)
  records = {by: summarize(pairs) for by, pairs in seconds.items()}
  if chosen.json:
    print(json.dumps({**records, "rounds": chosen.rounds}))
  else:
    print("       optimizer's share  quartiles        step")
    for by, record in records.items():
      print(
        f"{by:<6} {record['optimizer_share']:>17.1%}  "
        f"{record['lower_quartile']:.1%} to {record['upper_quartile']:.1%}  "
        f"{record['step_secs']:.3f} s"
      )


if __name__ == "__main__":
  sys.exit(main())
