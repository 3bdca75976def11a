# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares training on one GPU with plain JAX and with PyTorch.

python -m tools.bench gpu --chip h100_sxm --peer_python PYTHON
python -m tools.bench gpu --chip h100_sxm --size 1010M --batch_size 4
python -m tools.bench gpu --size 4.8M --dtype float32 --peer jax --rounds 3
"""

# Every program trains the same model on one random batch, with all of PaLM's
# optimizer; a turn is a step. The programs stay up, each in a process, and take
# turns on the same GPU, so each holds only the memory that it needs. Without a
# GPU, JAX_PLATFORMS=cpu in the environment rehearses this on the CPU. --chip
# names a file of gin/hardware/, of whose bfloat16 peak MFU is a share. Peers
# round logits to --dtype; palm_mtf, with its recipe unchanged, does not. The
# comments at the top of the files in tools/peers/ describe the peers.

import argparse
import contextlib
import dataclasses
import itertools
import os
import sys
from collections.abc import Iterator

from palm_mtf.accounting.flops import utilization
from palm_mtf.accounting.hardware import chip_names, peak_of_devices
from palm_mtf.cli.gin_files import read_chip
from palm_mtf.config import (
  AdafactorConfig,
  HardwareConfig,
  ModelConfig,
  PodsConfig,
)
from palm_mtf.errors import UserError
from palm_mtf.machine.process import own_process
from tools.bench import models, pairs, peers
from tools.bench.command import Flag, choices, worker_command
from tools.peers.turns import take_turns

PEERS = ("jax", "torch")
FLAGS = {
  "--size": Flag("125M", f"one of {', '.join(models.SIZES)}", models.SIZES),
  "--rounds": Flag(30, "turns of each program"),
  "--peer": Flag(",".join(PEERS), "some of them", choices(PEERS)),
  "--peer_python": Flag(sys.executable, "interpreter of the peers"),
  "--sequence_length": Flag(1024, "tokens per sequence"),
  "--batch_size": Flag(8, "sequences per step"),
  "--dtype": Flag("bfloat16", "of all programs", ["bfloat16", "float32"]),
  "--chip": Flag(None, "whose peak MFU is a share of", chip_names()),
}
BOUNDS = {**pairs.BOUNDS, "mfu": (0, 1)}
HEAD = (
  f"{'program':<9}{'dtype':<10}{'tokens/s':>11}{'MFU':>8}  ratio of ours to it"
)


def _config(size: str, dtype: str, sequence_length: int) -> ModelConfig:
  config = models.benchmark_config(dtype, size)
  return dataclasses.replace(config, sequence_length=sequence_length)


@contextlib.contextmanager
def open_step(
  config: ModelConfig,
  batch_size: int,
  optimizer: AdafactorConfig = models.PALM_OPTIMIZER,
) -> Iterator:
  """Yields a client and its `TrainStep` by XLA, with initial values.

  Args:
    config: architecture.
    batch_size: number of sequences in a step.
    optimizer: schedule, clipping and decay.
  """
  from palm_mtf.executors.xla.executor import EXECUTOR
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.runtime.client.connect import connect
  from palm_mtf.runtime.program import Program
  from palm_mtf.training.step import TrainStep

  cluster = connect(EXECUTOR, PodsConfig(), models.ONE_DEVICE, [], {})
  with cluster.client() as client:
    with client.graph.as_default():
      built = build_train_program(
        models.step_config(config, optimizer=optimizer),
        batch_size=batch_size,
        seed=0,
        devices=cluster.devices,
        build=EXECUTOR.build_program,
      )
    client.call(Program(operations=[built.initialize]))
    yield client, TrainStep(client, built)


def work(size: str, dtype: str, sequence_length: int, batch_size: int) -> None:
  """Takes turns with palm_mtf's program of accelerators."""
  own_process()  # as commands do
  config = _config(size, dtype, sequence_length)
  batch = models.random_tokens(config, batch_size)
  rows = {"inputs": batch, "targets": batch}
  with open_step(config, batch_size) as (_, step):
    number = itertools.count()

    def turn() -> dict[str, float]:
      return {"loss": step.run(rows, next(number))["loss"]}

    for _ in range(models.WARM_UP_STEPS):
      turn()
    take_turns(turn, {"parameters": models.num_parameters(config)})


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per program; a peer that cannot run is left out."""
  # By default the first process would take three quarters of the memory.
  os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
  settings = {
    "dtype": chosen.dtype,
    "sequence_length": chosen.sequence_length,
    "batch_size": chosen.batch_size,
  }
  ours = worker_command("gpu", size=chosen.size, **settings)
  commands = {("ours", chosen.dtype): ours}
  for name in chosen.peer:
    try:
      peers.check_peers("train", [name], chosen.peer_python)
    except UserError as error:
      print(f"{name} is left out: {error}", file=sys.stderr)
      continue
    commands[name, chosen.dtype] = peers.peer_command(
      chosen.peer_python,
      peers.PEERS["train"][name],
      {**models.SIZES[chosen.size], **settings},
    )
  config = _config(chosen.size, chosen.dtype, chosen.sequence_length)
  turns = pairs.race(commands, chosen.rounds)
  tokens = chosen.batch_size * chosen.sequence_length
  for record in pairs.speed_records(turns, tokens):
    if chosen.chip:
      rates = read_chip(chosen.chip).values()
      hardware = HardwareConfig(**{x.name.lower(): x.value for x in rates})
      peak = peak_of_devices(chosen.chip, hardware, 1)
      given = record["tokens_per_sec"], config, peak
      record["mfu"] = utilization(*given)["mfu"]
    yield {**record, "size": chosen.size, "chip": chosen.chip, **settings}


def row(record: dict) -> str:
  """Returns a record as a line of text."""
  share = f"{record['mfu']:.1%}" if "mfu" in record else "-"
  line = (
    f"{record['program']:<9}{record['dtype']:<10}"
    f"{record['tokens_per_sec']:>11,.0f}{share:>8}"
  )
  return (
    f"{line}  {pairs.describe_ratio(record)}" if "ratio" in record else line
  )
