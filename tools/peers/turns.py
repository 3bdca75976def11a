# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Flags of the programs that a bench compares, and their turns.

Imports only the standard library, because peers run in other environments.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Collection, Mapping

# The model of 26.6M parameters in tools/bench/models.py. Flags have the names
# of palm_mtf.config.ModelConfig, and the bench passes all of them.
_SIZES = {
  "num_layers": 6,
  "d_model": 512,
  "num_heads": 8,
  "d_kv": 64,
  "d_ff": 2048,
  "vocab_size": 8192,
  "sequence_length": 256,
  "prompt_tokens": 64,
  "batch_size": 8,
}


def make_parser(
  description: str, dtypes: Collection[str]
) -> argparse.ArgumentParser:
  """Returns a parser of the sizes and of --dtype, by default the first."""
  parser = argparse.ArgumentParser(description=description)
  for name, default in _SIZES.items():
    parser.add_argument(f"--{name}", type=int, default=default)
  parser.add_argument("--dtype", choices=dtypes, default=next(iter(dtypes)))
  return parser


def take_turns(
  turn: Callable[[], Mapping[str, float]], facts: Mapping[str, object]
) -> None:
  """Takes a turn for each line of stdin; prints its seconds and its values.

  Args:
    turn: takes a warm turn; returns numbers to report. If it returns "secs",
      they replace the seconds of the whole turn.
    facts: values to print before the first turn.
  """
  print(json.dumps(facts), flush=True)
  for _ in sys.stdin:
    start = time.perf_counter()
    values = turn()
    secs = time.perf_counter() - start
    print(json.dumps({"secs": secs, **values}), flush=True)


def continue_in_turns(
  read: Callable,
  prompts,
  sizes: argparse.Namespace,
  num_parameters: int,
  step_bytes: int,
) -> None:
  """Takes turns: a continuation of all prompts each. Prompts are not timed.

  Args:
    read: function of tokens, [batch, length], and the position of the first
      token; returns the likeliest next token of each row, [batch, 1]. Position
      0 begins new sequences.
    prompts: array of tokens, [batch, length].
    sizes: flags of `make_parser`.
    num_parameters: number of parameters of the model.
    step_bytes: bytes of weights that a step reads.
  """
  steps = range(sizes.prompt_tokens, sizes.sequence_length - 1)

  def turn() -> dict[str, float]:
    tokens = read(prompts, 0)
    start = time.perf_counter()
    for place in steps:
      tokens = read(tokens, place)
    secs = time.perf_counter() - start
    return {"secs": secs, "read_bytes": len(steps) * step_bytes}

  turn()  # warms up
  take_turns(turn, {"parameters": num_parameters})
