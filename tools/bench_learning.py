# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares what ours and a GPT in PyTorch learn in the same processor time.

  python tools/bench_learning.py --peer_python PYTHON
  python tools/bench_learning.py --peer_python PYTHON --minutes 2 \\
    --learning_rates 1e-3,4e-3 --gin.LEARNING_RATE=0.02

Results are on stdout, progress is on stderr.
"""

# Both learn the rows of the quickstart in their order, with its batch size, and
# measure their loss on its validation rows. The GPT has the same vocabulary and
# layers, and the width that gives it as many parameters as ours; peers/
# torch_gpt.py has its recipe. Programs take turns of TURN_SECS of their own
# processor time, which alone counts: neither compiling nor validation does. A
# GPT trains for each learning rate, and the best one is compared.

import argparse
import itertools
import json
import math
import os
import sys
import tempfile
import time

import numpy as np
from bench_command import (
  gin_flags,
  one_line_errors,
  read_gin_arguments,
  train_config,
)
from bench_pairs import Program
from bench_peers import peer_command
from bench_program import warm_training
from peers.turns import take_turns

from palm_mtf.accounting.architecture import count_parameters
from palm_mtf.config import Config
from palm_mtf.data.batches.corpus import Corpus
from palm_mtf.errors import UserError, check_count

RECIPE = "recipes/quickstart.gin"
TURN_SECS = 10.0
_ROWS_OF_PEER = 200_000  # more than it reads in an hour of two cores


def _corpus(config: Config, model_dir: str) -> Corpus:
  from palm_mtf.training.prepare import prepare

  return prepare(model_dir, config).corpus


def write_rows(config: Config, model_dir: str) -> float:
  """Writes the rows for the peer; returns bytes of text per token."""
  corpus, run = _corpus(config, model_dir), config.run
  (size,) = run.batch_sizes.sizes
  batches = corpus.batches(run.batch_sizes)
  shape = [_ROWS_OF_PEER // size * size, config.model.sequence_length]
  rows = np.lib.format.open_memmap(
    os.path.join(model_dir, "train.npy"), "w+", np.int32, tuple(shape)
  )
  for step in range(len(rows) // size):
    rows[step * size : (step + 1) * size] = batches.batch(step)["targets"]
  validation = np.concatenate(
    [x["targets"] for x in _validation(corpus, config)]
  )
  np.save(os.path.join(model_dir, "validation.npy"), validation)
  return corpus.validation_bytes_per_token


def _validation(corpus: Corpus, config: Config) -> list:
  run = config.run
  return list(
    corpus.validation_batches(
      batch_size=run.batch_sizes.sizes[0], num_rows=run.num_validation_rows
    )
  )


def train(config: Config, model_dir: str) -> None:
  """Takes turns: TURN_SECS of processor time each, then the loss."""
  from palm_mtf.generation.inference.sessions import mean_loss

  corpus = _corpus(config, model_dir)
  batches = corpus.batches(config.run.batch_sizes)
  validation = _validation(corpus, config)
  with warm_training(config, batches) as step:
    mean_loss(step.losses, validation[:1])  # compiles
    steps, spent_secs = itertools.count(), 0.0

    def turn() -> dict[str, float]:
      nonlocal spent_secs
      end = spent_secs + TURN_SECS
      while spent_secs < end:
        start = time.process_time()
        number = next(steps)
        step.run(batches.batch(number), number)
        spent_secs += time.process_time() - start
      loss = mean_loss(step.losses, validation)
      return {"processor_secs": spent_secs, "loss": loss, "step": number + 1}

    take_turns(turn, {"parameters": count_parameters(config.model)})


def gpt_width(config: Config) -> int:
  """Returns the width at which a GPT has as many parameters as ours."""
  model, wanted = config.model, count_parameters(config.model)

  def count(width: int) -> int:
    tables = model.vocab_size + model.sequence_length
    # Matrices, their biases and those of norms.
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


def secs_to(curve: list[dict], loss: float) -> float | None:
  """Returns the processor seconds after which a loss is reached, or None."""
  return next((x["processor_secs"] for x in curve if x["loss"] <= loss), None)


def lines(records: dict[str, list[dict]], bytes_per_token: float) -> list[str]:
  """Returns the table: bits a byte of each program, by processor seconds."""
  ours, *_ = records
  made = ["bits a byte of the validation text"]
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
    secs = secs_to(records[ours], last["loss"])
    reached = "not reached by ours" if secs is None else f"{secs:.0f} s of ours"
    made.append(f"{last['processor_secs']:.0f} s of {best}: {reached}")
  return made


@one_line_errors
def main() -> None:
  """Compares, or takes turns as a program of a comparison."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--minutes", type=int, default=10, help="processor time of each program")
  add("--learning_rates", default="1e-3,2e-3,4e-3", help="of GPTs")
  add("--peer_python", help="interpreter with torch and numpy; else ours alone")
  add("--worker", help=argparse.SUPPRESS)
  chosen, macros = read_gin_arguments(parser, RECIPE)
  check_count("--minutes", chosen.minutes)
  try:
    rates = [float(x) for x in chosen.learning_rates.split(",")]
  except ValueError:
    raise UserError(
      f"--learning_rates = {chosen.learning_rates}: give numbers, as in "
      "1e-3,4e-3."
    ) from None
  files = chosen.gin_file or [RECIPE]
  config = train_config(files, ["NUM_PODS=1", "PROMPTS=[]", *macros])
  if chosen.worker:
    train(config, chosen.worker)
    return
  budget = 60.0 * chosen.minutes
  with tempfile.TemporaryDirectory() as folder:
    bytes_per_token = write_rows(config, folder)
    flags = [*gin_flags(files, macros), f"--worker={folder}"]
    programs = [Program("ours", [sys.executable, __file__, *flags])]
    try:
      for rate in rates if chosen.peer_python else []:
        command = peer_command(
          chosen.peer_python,
          ["torch_gpt.py"],
          _gpt_sizes(config),
          batch_size=config.run.batch_sizes.sizes[0],
          learning_rate=rate,
          budget_secs=budget,
          turn_secs=TURN_SECS,
          data=folder,
        )
        programs.append(Program(f"GPT {rate:g}", command))
      records = race(programs, math.ceil(budget / TURN_SECS))
    finally:
      for program in programs:
        program.__exit__()
  if chosen.json:
    print(json.dumps({"bytes_per_token": bytes_per_token, **records}))
    return
  print("\n".join(lines(records, bytes_per_token)))


def _gpt_sizes(config: Config) -> dict[str, int]:
  names = ("num_layers", "num_heads", "vocab_size", "sequence_length")
  sizes = {name: getattr(config.model, name) for name in names}
  return {**sizes, "d_model": gpt_width(config)}


if __name__ == "__main__":
  sys.exit(main())
