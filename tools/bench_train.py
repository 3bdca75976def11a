# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of training a 26.6M-parameter PaLM with other frameworks.

  python tools/bench_train.py
  python tools/bench_train.py --peer torch,jax --peer_python PATH --json

Results are on stdout, progress is on stderr.
"""

# Every program trains the model of bench_peers.py on one random batch, in a
# process of its own. The head of each file in tools/peers/ says how it is
# written, and what its optimizer does less than PaLM's.

import argparse
import json
import statistics
import sys

from bench_command import one_line_errors, random_tokens, seconds_of
from bench_peers import (
  BATCH_SIZE,
  PALM_OPTIMIZER,
  benchmark_config,
  compare,
  peer_command,
  read_arguments,
  run_rounds,
)

from palm_mtf.accounting.params import count_norm_scales, count_parameters
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.errors import check_choice, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here

WARM_UP_STEPS = 2  # not timed: the first compiles, the second fills caches

# Each peer's program and flags, and the modules that it imports.
PEERS = {
  "torch": (["torch_palm.py", "--compile"], ["torch"]),
  "torch_eager": (["torch_palm.py"], ["torch"]),
  "jax": (["jax_palm.py"], ["jax", "optax"]),
}


def run_ours(config: PalmConfig, steps: int) -> dict[str, float]:
  """Trains with palm_mtf; returns tokens_per_sec and parameters."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.programs.train_program import build_train_program

  tokens = random_tokens(config, BATCH_SIZE)
  mesh = MeshLayout(mesh_shape="", layout="")
  with tf.Graph().as_default(), tf.Session(config=session_config(1)) as session:
    program = build_train_program(
      config, mesh, PALM_OPTIMIZER, batch_size=BATCH_SIZE, seed=0
    )
    session.run(program.initialize)
    # Without the feeds and fetches that training logs: the step alone.
    run_step = session.make_callable(
      [program.metrics["loss"], program.update],
      [*program.pods[0].features.values(), program.step],
    )
    times = [
      seconds_of(run_step, tokens, tokens, step)
      for step in range(WARM_UP_STEPS + steps)
    ]
  speed = tokens.size / statistics.median(times[WARM_UP_STEPS:])
  return {
    "tokens_per_sec": round(speed, 1),
    "parameters": count_parameters(config) + count_norm_scales(config),
  }


def print_table(records: list[dict]) -> None:
  """Prints the records for a reader; ratio is ours / peer."""
  print(f"{'program':<12} {'tokens/s':>9} {'ratio':>6}  lowest to highest")
  print(f"{'palm_mtf':<12} {records[0]['tokens_per_sec']:>9,.0f}")
  for record in records:
    if "peer" in record:
      print(
        f"{record['peer']:<12} {record['peer_tokens_per_sec']:>9,.0f} "
        f"{record['ratio']:>6.2f}  "
        f"{record['ratio_min']:.2f} to {record['ratio_max']:.2f}"
      )


@one_line_errors
def main() -> None:
  """Compares, or as a worker of a comparison runs ours and prints its speed."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--steps", type=int, default=10, help="timed steps of one run")
  # By default the dtype that this machine multiplies fast.
  dtype_help = "of all programs, bfloat16 or float32"
  add("--dtype", default=fast_dtype_here(), help=dtype_help)
  add("--worker", action="store_true", help=argparse.SUPPRESS)
  modules_of = {name: modules for name, (_, modules) in PEERS.items()}
  arguments = read_arguments(parser, modules_of)
  dtype, steps = arguments.dtype, arguments.steps
  check_count("--steps", steps)
  check_choice("--dtype", dtype, ["bfloat16", "float32"])
  config = benchmark_config(dtype)
  if arguments.worker:
    print(json.dumps(run_ours(config, steps)))
    return
  # Ours too runs in a process of its own, as the peers do.
  worker = ["--worker", f"--dtype={dtype}", f"--steps={steps}"]
  commands = {("ours", dtype): [sys.executable, __file__, *worker]}
  for name in arguments.peer:
    commands[name, dtype] = peer_command(
      arguments.peer_python,
      PEERS[name][0],
      config,
      batch_size=BATCH_SIZE,
      steps=steps,
    )
  records = compare(run_rounds(commands, arguments.rounds))
  if not arguments.json:
    print_table(records)
    return
  for record in records:
    print(json.dumps({**record, "steps": steps, "rounds": arguments.rounds}))


if __name__ == "__main__":
  sys.exit(main())
