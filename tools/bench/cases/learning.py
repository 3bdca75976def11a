# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares what palm_mtf and a GPT in PyTorch learn in equal processor time.

  python -m tools.bench learning --peer_python PYTHON
  python -m tools.bench learning --peer_python PYTHON --minutes 2 \\
    --learning_rates 1e-3,4e-3 --gin.LEARNING_RATE=0.02
"""

# Both programs learn the rows of the quickstart in the same order, with its
# batch size, and measure their loss on its validation rows. The GPT has the
# same vocabulary and number of layers, and the width that gives it as many
# parameters. Its recipe is in tools/peers/torch_peer.py. Programs take turns; a
# turn is TURN_SECS of the program's processor time. Only that time counts,
# without compilation and validation. A GPT trains for each learning rate, and
# the best GPT is compared.

import argparse
import contextlib
import itertools
import math
import os
import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np

from palm_mtf.architecture.parameters import count_parameters
from palm_mtf.config import Config
from palm_mtf.data.batches.corpus import Batch, Corpus
from tools.bench.command import (
  Flag,
  numbers,
  train_config,
  worker_command,
)
from tools.bench.models import warm_training
from tools.bench.pairs import POSITIVE, Program
from tools.bench.peers import PEERS, peer_command
from tools.peers.turns import take_turns

RECIPE = "recipes/quickstart.gin"
TURN_SECS = 10.0
_DEFAULTS = ["NUM_PODS=1", "PROMPTS=[]"]
_ROWS_OF_PEER = 200_000  # more than the GPT reads in an hour on two cores
BOUNDS = dict.fromkeys(("loss", "processor_secs", "step"), POSITIVE)
FLAGS = {
  "--minutes": Flag(10, "processor time of each program"),
  "--learning_rates": Flag(
    "1e-3,2e-3,4e-3", "of GPTs", numbers("1e-3,4e-3", float)
  ),
  "--peer_python": Flag(None, "has torch and numpy; else without a GPT"),
}


def _corpus(config: Config, model_dir: str) -> tuple[Corpus, list[Batch]]:
  """Returns the corpus of a run, and its validation batches."""
  from palm_mtf.training.job import prepare

  corpus, run = prepare(model_dir, config).corpus, config.run
  return corpus, list(
    corpus.validation_batches(
      batch_size=run.batch_sizes.sizes[0], num_rows=run.num_validation_rows
    )
  )


def write_rows(config: Config, model_dir: str) -> float:
  """Writes the rows for the peer; returns bytes of text per token."""
  corpus, validation = _corpus(config, model_dir)
  (size,) = config.run.batch_sizes.sizes
  batches = corpus.batches(config.run.batch_sizes)
  shape = [_ROWS_OF_PEER // size * size, config.model.sequence_length]
  rows = np.lib.format.open_memmap(
    os.path.join(model_dir, "train.npy"), "w+", np.int32, tuple(shape)
  )
  for step in range(len(rows) // size):
    rows[step * size : (step + 1) * size] = batches.batch(step)["targets"]
  np.save(
    os.path.join(model_dir, "validation.npy"),
    np.concatenate([x["targets"] for x in validation]),
  )
  return corpus.validation_bytes_per_token


def work(files: list[str], macros: list[str], model_dir: str) -> None:
  """Takes turns: training for TURN_SECS of processor time, then the loss."""
  from palm_mtf.generation.inference.sessions import mean_losses

  config = train_config(files, macros, _DEFAULTS)
  corpus, validation = _corpus(config, model_dir)
  batches = corpus.batches(config.run.batch_sizes)
  with warm_training(config, batches) as step:
    mean_losses(step.losses, validation[:1])  # compiles
    steps, spent_secs = itertools.count(), 0.0

    def turn() -> dict[str, float]:
      nonlocal spent_secs
      end = spent_secs + TURN_SECS
      while spent_secs < end:
        start = time.process_time()
        number = next(steps)
        step.run(batches.batch(number), number)
        spent_secs += time.process_time() - start
      loss, *_ = mean_losses(step.losses, validation)
      return {"processor_secs": spent_secs, "loss": loss, "step": number + 1}

    take_turns(turn, {"parameters": count_parameters(config.model)})


def choose_gpt_width(config: Config) -> int:
  """Returns the width at which a GPT has as many parameters as ours."""
  model, wanted = config.model, count_parameters(config.model)

  def count(width: int) -> int:
    tables = model.vocab_size + model.sequence_length
    # Matrices, their biases, and the scales and biases of norms.
    of_layer = 12 * width * width + 13 * width
    return tables * width + model.num_layers * of_layer + 2 * width

  step = 2 * model.num_heads
  widths = range(step, 8 * model.d_model, step)
  return min(widths, key=lambda width: abs(count(width) - wanted))


def race(programs: list[Program], turns: int) -> dict[str, list[dict]]:
  """Returns processor seconds and loss of each program after each turn."""
  found: dict[str, list[dict]] = {x.name: [] for x in programs}
  for number in range(turns):
    for program in programs:
      found[program.name].append(dict(program.turn().values))
    losses = ", ".join(f"{x} {y[-1]['loss']:.4f}" for x, y in found.items())
    print(f"turn {number + 1}/{turns}: {losses}", file=sys.stderr, flush=True)
  return found


def find_secs_to(curve: list[dict], loss: float) -> float | None:
  """Returns the processor seconds until a loss is reached, or None."""
  return next((x["processor_secs"] for x in curve if x["loss"] <= loss), None)


def lines(records: dict[str, list[dict]], bytes_per_token: float) -> list[str]:
  """Returns the table: bits per byte of each program, by processor seconds."""
  ours, *_ = records
  made = ["bits per byte of the validation text"]
  made.append(f"{'processor s':>11}" + "".join(f"{x:>14}" for x in records))
  for rows in zip(*records.values(), strict=True):
    bits = [x["loss"] / math.log(2) / bytes_per_token for x in rows]
    cells = "".join(f"{x:>14.4f}" for x in bits)
    made.append(f"{rows[0]['processor_secs']:>11.0f}" + cells)
  steps = "".join(f"{curve[-1]['step']:>14,}" for curve in records.values())
  made.append(f"{'steps':>11}" + steps)
  peers = {name: curve for name, curve in records.items() if name != ours}
  if peers:
    best = min(peers, key=lambda name: peers[name][-1]["loss"])
    last = peers[best][-1]
    secs = find_secs_to(records[ours], last["loss"])
    reached = "not reached by ours" if secs is None else f"{secs:.0f} s of ours"
    made.append(f"{last['processor_secs']:.0f} s of {best}: {reached}")
  return made


def _gpt_command(
  config: Config, chosen: argparse.Namespace, rate: float, folder: str
) -> list[str]:
  names = ("num_layers", "num_heads", "vocab_size", "sequence_length")
  return peer_command(
    chosen.peer_python,
    PEERS["learning"]["gpt"],
    {name: getattr(config.model, name) for name in names},
    d_model=choose_gpt_width(config),
    batch_size=config.run.batch_sizes.sizes[0],
    learning_rate=rate,
    budget_secs=60.0 * chosen.minutes,
    turn_secs=TURN_SECS,
    data=folder,
  )


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields one record: the bytes per token, and the curve of each program."""
  config = train_config(**chosen.gin, defaults=_DEFAULTS)
  with (
    tempfile.TemporaryDirectory() as folder,
    contextlib.ExitStack() as stack,
  ):
    bytes_per_token = write_rows(config, folder)
    commands = {
      "ours": worker_command("learning", model_dir=folder, **chosen.gin)
    }
    for rate in chosen.learning_rates if chosen.peer_python else []:
      commands[f"GPT {rate:g}"] = _gpt_command(config, chosen, rate, folder)
    programs = [
      stack.enter_context(Program(name, command))
      for name, command in commands.items()
    ]
    curves = race(programs, math.ceil(60.0 * chosen.minutes / TURN_SECS))
  yield {"bytes_per_token": bytes_per_token, **curves}


def row(record: dict) -> str:
  """Returns the whole table."""
  curves = dict(record)
  return "\n".join(lines(curves, curves.pop("bytes_per_token")))
