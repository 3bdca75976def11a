# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the reading of a prompt with the forward pass of training.

  python tools/bench_prompt.py
  python tools/bench_prompt.py --size 125M --tokens 2000

A ratio above 1 says that the prompt is read faster. Results are on stdout,
progress is on stderr.
"""

# Both compute every position of one text; training needs the logits of all of
# them for its loss, and a prompt those of its last token, which one step reads
# again to choose the next one. Quantized weights are compared with training in
# the fast dtype of activations.

import argparse
import dataclasses
import json
import sys

from bench_command import one_line_errors, random_tokens
from bench_decode import OURS, Task, choose_first_tokens, decoding
from bench_pairs import race, rows
from bench_peers import PALM_OPTIMIZER, num_parameters, read_arguments, table
from bench_program import training_program
from peers.turns import take_turns

from palm_mtf.config import PalmConfig
from palm_mtf.errors import check_count


def read_prompts(task: Task, dtype: str) -> None:
  """Takes turns: a prompt each, up to the first new token."""
  with decoding(task, dtype) as (session, program, feed):

    def turn() -> dict[str, float]:
      choose_first_tokens(session, program, feed)
      return {}

    turn()  # compiles
    take_turns(turn, {"parameters": num_parameters(task.config(dtype))})


def compute_losses(config: PalmConfig) -> None:
  """Takes turns: the loss of one text each."""
  tokens = random_tokens(config, 1)
  with training_program(config, PALM_OPTIMIZER, batch_size=1) as (
    session,
    program,
  ):
    (pod,) = program.pods
    feed = dict.fromkeys(pod.features.values(), tokens)

    def turn() -> dict[str, float]:
      return {"loss": float(session.run(pod.loss, feed))}

    turn()  # compiles
    take_turns(turn, {"parameters": num_parameters(config)})


@one_line_errors
def main() -> None:
  """Compares, or takes turns as a program of a comparison."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--tokens", type=int, default=1000, help="of the prompt")
  add("--prompt", choices=OURS.values(), help=argparse.SUPPRESS)
  add("--loss", choices=OURS.values(), help=argparse.SUPPRESS)
  arguments = read_arguments(parser, {})
  check_count("--rounds", arguments.rounds)
  check_count("--tokens", arguments.tokens, minimum=8)
  size, tokens = arguments.size, arguments.tokens
  task = Task(size, sequence_length=4 * tokens, batch_size=1)
  if arguments.prompt:
    read_prompts(task, arguments.prompt)
    return
  if arguments.loss:
    config = task.config(arguments.loss)
    compute_losses(dataclasses.replace(config, sequence_length=tokens))
    return
  worker = [sys.executable, __file__, f"--size={size}", f"--tokens={tokens}"]
  for dtype in OURS.values():
    commands = {
      (name, dtype): [*worker, f"--{name}={dtype}"]
      for name in ("prompt", "loss")
    }
    found = rows(race(commands, arguments.rounds), tokens)
    lines = [json.dumps({**x, "size": size, "tokens": tokens}) for x in found]
    for line in lines if arguments.json else table(found):
      print(line, flush=True)


if __name__ == "__main__":
  sys.exit(main())
