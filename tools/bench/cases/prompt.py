# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the reading of a prompt with the forward pass of training.

  python -m tools.bench prompt
  python -m tools.bench prompt --size 125M --tokens 2000

A ratio above 1 means that the prompt is read faster.
"""

# Both compute every position of one text. Training needs the logits of all
# positions for its loss. A prompt needs only the logits of its last token,
# which one decoding step computes again to choose the next token. Quantized
# weights are compared with training in the fast dtype of activations.

import argparse
import dataclasses
from collections.abc import Iterator

from tools.bench import models, pairs
from tools.bench.cases import decode
from tools.bench.command import Flag, count, worker_command
from tools.bench.peers import SPEED_FLAGS
from tools.peers.turns import take_turns

HEAD, row, BOUNDS = "".join(pairs.SPEEDS_HEAD), pairs.speeds_row, pairs.BOUNDS
FLAGS = {
  **SPEED_FLAGS,
  "--tokens": Flag(1000, "length of the prompt", count(8)),
}


def _read_prompts(task: decode.Task, dtype: str) -> None:
  """Takes turns: one prompt each, up to the first new token."""
  with decode.decoding(task, dtype) as (client, programs, inputs, _):

    def turn() -> dict[str, float]:
      decode.choose_first_tokens(client, programs, inputs)
      return {}

    turn()  # compiles
    take_turns(turn, {"parameters": models.num_parameters(task.config(dtype))})


def _compute_losses(task: decode.Task, dtype: str, tokens: int) -> None:
  """Takes turns: the loss of one text each."""
  config = dataclasses.replace(task.config(dtype), sequence_length=tokens)
  features = models.random_tokens(config, 1)
  with models.training_program(config, batch_size=1) as (session, program):
    (of_pod,) = program.losses.calls
    loss = program.programs[of_pod.nodes]
    feed = dict.fromkeys(loss.inputs.values(), features)

    def turn() -> dict[str, float]:
      return {"loss": float(session.run(loss.outputs[0], feed))}

    turn()  # compiles
    take_turns(turn, {"parameters": models.num_parameters(config)})


def work(program: str, dtype: str, size: str, tokens: int) -> None:
  """Takes turns as the program "prompt" or "loss"."""
  task = decode.Task(size, sequence_length=4 * tokens, batch_size=1)
  if program == "prompt":
    _read_prompts(task, dtype)
  else:
    _compute_losses(task, dtype, tokens)


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields two records per dtype."""
  settings = {"size": chosen.size, "tokens": chosen.tokens}
  for dtype in decode.OURS.values():
    commands = {
      (name, dtype): worker_command(
        "prompt", program=name, dtype=dtype, **settings
      )
      for name in ("prompt", "loss")
    }
    turns = pairs.race(commands, chosen.rounds)
    for record in pairs.speed_records(turns, chosen.tokens):
      yield {**record, **settings}
