# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the optimizer's share of a training step.

  python tools/bench_optimizer.py
  python tools/bench_optimizer.py --gin.SECOND_MOMENT='"factored"' --json

A whole step and the same step up to the gradients' global norm, on one random
batch of the recipe's size, take turns in one process; the optimizer's share is
what the whole one takes longer, over the whole one. The median over --rounds
pairs is printed, with the quartiles, by the clock and by the CPU seconds of the
process; on a busy machine only the latter mean something. --gin_file and
--gin.NAME=VALUE are those of `palm_mtf train`. Results are on stdout.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from palm_mtf.config import Config
from palm_mtf.errors import UserError, check_count

# Beside this file; nothing else puts the folder on the path under pytest.
sys.path.append(str(Path(__file__).resolve().parent))
from bench_command import macros_of, train_config

WARM_UP_STEPS = 3  # not timed: the first compiles, the others fill caches
RECIPE = "recipes/quickstart.gin"


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
  """Returns the command line's choices, and macros as gin wants them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--gin_file", action="append", help=f"by default {RECIPE}")
  add("--rounds", type=int, default=20, help="timed pairs of steps")
  add("--json", action="store_true", help="print one object")
  chosen, others = parser.parse_known_args()
  check_count("--rounds", chosen.rounds)
  return chosen, macros_of(others)


def seconds_of_pairs(config: Config, rounds: int) -> dict[str, list]:
  """Returns the seconds of whole steps and of their gradients, in pairs.

  Returns:
    A list of `rounds` pairs for "clock" and one for "cpu".
  """
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.programs.train_program import build_train_program

  model, mesh = config.model, config.mesh_layout
  batch_size = config.run.batch_sizes.sizes[0] // mesh.num_microbatches
  tokens = np.random.default_rng(0).integers(
    model.vocab_size, size=[batch_size, model.sequence_length]
  )
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      model, mesh, config.optimizer, batch_size=batch_size, seed=0
    )
    session.run(program.initialize)
    feeds = [*program.pods[0].features.values(), program.step]
    norm = program.metrics["grad_norm"]
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
  clock, cpu = np.array(times[2 * WARM_UP_STEPS :]).T.reshape(2, -1, 2)
  return {"clock": clock.tolist(), "cpu": cpu.tolist()}


def summarize(pairs: list[tuple[float, float]]) -> dict[str, float]:
  """Returns the median share and its quartiles, and the median seconds.

  Example:
    [(2, 1), (2, 1.5), (2, 1.8)] has the shares 0.5, 0.25 and 0.1; the median
    share is 0.25.
  """
  shares = [(whole - gradients) / whole for whole, gradients in pairs]
  low, middle, high = np.percentile(shares, [25, 50, 75])
  return {
    "optimizer_share": round(float(middle), 4),
    "lower_quartile": round(float(low), 4),
    "upper_quartile": round(float(high), 4),
    "step_secs": round(statistics.median(whole for whole, _ in pairs), 5),
  }


def main() -> int:
  """Returns the exit code."""
  try:
    chosen, macros = read_arguments()
    macros = [
      "MODEL_DIR='none'",  # nothing is written
      "NUM_MICROBATCHES=1",
      *macros,
    ]
    files = chosen.gin_file or [RECIPE]
    config = train_config(files, macros)
  except UserError as error:
    print(f"bench_optimizer: {error}", file=sys.stderr)
    return 2
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
  return 0


if __name__ == "__main__":
  sys.exit(main())
