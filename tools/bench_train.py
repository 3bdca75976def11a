# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the speed of training with other frameworks.

  python tools/bench_train.py
  python tools/bench_train.py --size 113M --dtype float32 --rounds 30
  python tools/bench_train.py --peer torch,jax --peer_python PYTHON --json

Results are on stdout, progress is on stderr.
"""

# Every program trains the same architecture on one random batch of 2,048
# tokens, or of one longer sequence; a turn is a step. Attention to more than
# 2,048 positions is computed again by ours (REMAT), and not kept by peers. The
# optimizer of all is PaLM's. Peers round their logits to --dtype, which ours,
# the recipe as it is, does not. The head of each file in tools/peers/ says how
# it is written.

import argparse
import dataclasses
import itertools
import json
import sys

from bench_command import one_line_errors, random_tokens
from bench_pairs import race, rows
from bench_peers import (
  PALM_OPTIMIZER,
  SIZES,
  benchmark_config,
  num_parameters,
  peer_command,
  read_arguments,
  table,
)
from bench_program import training_program
from peers.turns import take_turns

from palm_mtf.config import PalmConfig
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here
from palm_mtf.machine.process import own_process

WARM_UP_STEPS = 2  # not timed: the first compiles, the second fills caches
TOKENS = 2048  # of a step, unless a sequence is longer

# Each peer's program and flags, and the modules that it imports.
PEERS = {
  "torch": (["torch_palm.py", "--compile"], ["torch"]),
  "torch_eager": (["torch_palm.py"], ["torch"]),
  "jax": (["jax_palm.py"], ["jax"]),
}


def run_ours(config: PalmConfig, batch_size: int) -> None:
  """Takes turns: a training step each."""
  own_process()  # as commands do
  tokens = random_tokens(config, batch_size)
  with training_program(config, PALM_OPTIMIZER, batch_size=batch_size) as (
    session,
    program,
  ):
    # Without the feeds and fetches that training logs: the step alone.
    run_step = session.make_callable(
      [program.metrics["loss"], program.update],
      [*program.pods[0].features.values(), program.step],
    )
    steps = itertools.count()

    def turn() -> dict[str, float]:
      loss, _ = run_step(tokens, tokens, next(steps))
      return {"loss": float(loss)}

    for _ in range(WARM_UP_STEPS):
      turn()
    take_turns(turn, {"parameters": num_parameters(config)})


@one_line_errors
def main() -> None:
  """Compares, or takes turns as a program of a comparison."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  length_help = f"a divisor of {TOKENS}, or more than that"
  add("--sequence_length", type=int, default=256, help=length_help)
  # By default the dtype that this machine multiplies fast.
  dtype_help = "of all programs, bfloat16 or float32"
  add("--dtype", default=fast_dtype_here(), help=dtype_help)
  add("--worker", action="store_true", help=argparse.SUPPRESS)
  modules_of = {name: modules for name, (_, modules) in PEERS.items()}
  arguments = read_arguments(parser, modules_of)
  dtype, length = arguments.dtype, arguments.sequence_length
  check_count("--rounds", arguments.rounds)
  check_choice("--dtype", dtype, ["bfloat16", "float32"])
  check_count("--sequence_length", length)
  tokens = max(TOKENS, length)
  if tokens % length:
    raise UserError(
      f"--sequence_length = {length}: a step has {TOKENS:,} tokens; give a "
      "divisor of that, such as 1024, or more."
    )
  config = dataclasses.replace(
    benchmark_config(dtype, arguments.size),
    sequence_length=length,
    remat="attention" if length > TOKENS else "none",
  )
  if arguments.worker:
    run_ours(config, tokens // length)
    return
  # Ours too runs in a process of its own, as the peers do.
  worker = ["--worker", f"--dtype={dtype}", f"--size={arguments.size}"]
  worker.append(f"--sequence_length={length}")
  commands = {("ours", dtype): [sys.executable, __file__, *worker]}
  for name in arguments.peer:
    commands[name, dtype] = peer_command(
      arguments.peer_python,
      PEERS[name][0],
      SIZES[arguments.size] | {"sequence_length": length},
      batch_size=tokens // length,
      dtype=dtype,
    )
  found = rows(race(commands, arguments.rounds), tokens)
  if not arguments.json:
    print("\n".join(table(found)))
    return
  for row in found:
    task = {"size": arguments.size, "sequence_length": length}
    print(json.dumps({**row, **task}))


if __name__ == "__main__":
  sys.exit(main())
