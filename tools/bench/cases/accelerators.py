# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares the program of accelerators with the host path on this CPU.

python -m tools.bench accelerators
python -m tools.bench accelerators --size 113M --dtype float32 --rounds 30
"""

# Two programs take turns, one training step each, on one device and with the
# same rows. The host path computes with TensorFlow, oneDNN and palm_mtf's C++.
# XLA compiles the program of accelerators for one virtual CPU device.

import argparse
import contextlib
import os
from collections.abc import Iterator

from palm_mtf.config import ModelConfig, OptimizerConfig, PodsConfig
from palm_mtf.machine.process import own_process
from tools.bench import models, pairs
from tools.bench.command import Flag, worker_command
from tools.peers.turns import take_turns

PROGRAMS = ("host", "xla")
BATCH_SIZE = 8
HEAD, row, BOUNDS = "".join(pairs.SPEEDS_HEAD), pairs.speeds_row, pairs.BOUNDS
FLAGS = {
  "--size": Flag("26.6M", "of the model", [*models.SIZES]),
  "--dtype": Flag(
    models.fast_dtype_here(), "of both programs", ["bfloat16", "float32"]
  ),
  "--rounds": Flag(30, "timed steps of each program"),
}


def work(program: str, size: str, dtype: str) -> None:
  """Takes turns: one training step each."""
  own_process()  # as commands do
  os.environ["JAX_PLATFORMS"] = "cpu"
  config = models.benchmark_config(dtype, size)
  train(program, config, BATCH_SIZE)


def train(program: str, config: ModelConfig, batch_size: int) -> None:
  """Takes turns: one training step each, on the same random rows."""
  batch = models.random_tokens(config, batch_size)
  rows = {"inputs": batch, "targets": batch}
  with open_step(program, config, batch_size) as (_, step):
    number = 0

    def turn() -> dict[str, float]:
      nonlocal number
      number += 1
      return {"loss": step.run(rows, number - 1)["loss"]}

    for _ in range(models.WARM_UP_STEPS):
      turn()
    take_turns(turn, {"parameters": models.num_parameters(config)})


@contextlib.contextmanager
def open_step(
  program: str,
  config: ModelConfig,
  batch_size: int = BATCH_SIZE,
  optimizer: OptimizerConfig = models.PALM_OPTIMIZER,
) -> Iterator:
  """Yields a client and its `TrainStep`, with initial values.

  Args:
    program: one of PROGRAMS.
    config: architecture.
    batch_size: number of sequences in a step.
    optimizer: one of the optimizers, with its schedule and clipping.
  """
  from palm_mtf.executors.host.executor import EXECUTOR as HOST
  from palm_mtf.executors.xla.executor import EXECUTOR as XLA
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.runtime.client.connect import connect
  from palm_mtf.runtime.program import Program
  from palm_mtf.training.step import TrainStep

  executor, pods = XLA if program == "xla" else HOST, PodsConfig()
  cluster = connect(executor, pods, models.ONE_DEVICE, [], {})
  with cluster.client() as client:
    with client.graph.as_default():
      built = build_train_program(
        models.step_config(config, optimizer=optimizer),
        batch_size=batch_size,
        seed=0,
        devices=cluster.devices,
        build=executor.build_program,
      )
    client.call(Program(operations=[built.initialize]))
    yield client, TrainStep(client, built)


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per program; the ratio is XLA's step to the host's."""
  dtype = chosen.dtype
  commands = {
    (name, dtype): worker_command(
      "accelerators", program=name, size=chosen.size, dtype=dtype
    )
    for name in PROGRAMS
  }
  turns = pairs.race(commands, chosen.rounds)
  tokens = BATCH_SIZE * models.SIZES[chosen.size]["sequence_length"]
  for record in pairs.speed_records(turns, tokens):
    losses = [x.values["loss"] for x in turns[record["program"], dtype]]
    yield {**record, "losses": losses, "size": chosen.size}
