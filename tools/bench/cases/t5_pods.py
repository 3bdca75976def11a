# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares T5's training step on two pods with its step on one pod.

python -m tools.bench t5_pods
python -m tools.bench t5_pods --steps 100 --json
"""

# The model is a larger version of examples/t5_on_two_pods, with its optimizer.
# Two programs take turns, one step each, on the same rows and on two virtual
# devices of one process, which have a thread each:
#
#   one pod    the two devices are a mesh, "batch:data"; they all-reduce
#   two pods   each device is a pod; they exchange gradients
#
# Both sum the gradients of the two devices in memory, so the ratio covers
# everything except a network between pods, which the case `pods` measures.

import argparse
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from palm_mtf import foreign_models  # isort: skip, makes Mesh TensorFlow importable

import gin
import numpy as np

from palm_mtf._tf import tf
from palm_mtf.foreign_models.training import ModelLoss
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.train_program import build_program
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program
from palm_mtf.training.step import TrainStep
from tools.bench.command import Flag, worker_command
from tools.bench.pairs import race, ratio
from tools.peers.turns import take_turns

EXAMPLE = str(
  Path(__file__).resolve().parents[3] / "examples" / "t5_on_two_pods"
)
VOCAB_SIZE, LENGTH, BATCH_SIZE = 4096, 128, 16
# Large enough that matrix products take most of a step.
SIZES = {
  "D_MODEL": 256,
  "D_FF": 1024,
  "NUM_HEADS": 4,
  "D_KV": 64,
  "NUM_LAYERS": 2,
  "VOCAB_SIZE": VOCAB_SIZE,
}
PROGRAMS = ("one pod", "two pods")
DEVICES = ("/device:cpu:0", "/device:cpu:1")
FLAGS = {"--steps": Flag(100, "timed steps of each program")}


def build_step(client: Client, pods: list[list[str]]) -> TrainStep:
  """Returns a training step on pods of these devices, with initial values."""
  sys.path.append(EXAMPLE)  # train.gin imports the example's module
  foreign_models.parse_gin(
    [os.path.join(EXAMPLE, "train.gin")],
    [f"{name}={size}" for name, size in SIZES.items()],
  )
  is_split = len(pods[0]) > 1
  mesh = foreign_models.DeviceMesh(
    mesh_shape="data:2" if is_split else "",
    layout="batch:data" if is_split else "",
  )
  with client.graph.as_default():
    loss_function = ModelLoss(
      gin.get_configurable("t5_loss"),
      dict.fromkeys(("inputs", "targets"), ("int32", f"length:{LENGTH}")),
      mesh,
      num_rows=BATCH_SIZE // len(pods),
      seed=0,
    )
    program = build_program(
      loss_function,
      mesh,
      gin.get_configurable("AdafactorConfig")(),
      batch_size=BATCH_SIZE,
      pods=foreign_models.PodsConfig(num_pods=len(pods)),
      devices=CpuGpuDevices(DEVICES[0], pods),
    )
  client.call(Program(operations=[program.initialize]))
  return TrainStep(client, program)


def make_batch() -> dict[str, np.ndarray]:
  """Returns a batch of random tokens."""
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, VOCAB_SIZE, (BATCH_SIZE, LENGTH), np.int32)
  return {"inputs": tokens, "targets": tokens}


def work(name: str) -> None:
  """Takes turns: one training step each."""
  batch = make_batch()
  pods = [list(DEVICES)] if name == PROGRAMS[0] else [[x] for x in DEVICES]
  config = session_config(1, len(DEVICES))
  with Client(tf.Session(graph=tf.Graph(), config=config)) as client:
    step, number = build_step(client, pods), 0

    def turn() -> dict[str, float]:
      nonlocal number
      number += 1
      return {"loss": step.run(batch, number - 1)["loss"]}

    for _ in range(3):  # compiles and fills caches
      turn()
    take_turns(turn, {})


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields one record: the ratio of two pods to one pod, and both losses."""
  commands = {name: worker_command("t5_pods", name=name) for name in PROGRAMS}
  for command in commands.values():
    command[1:1] = ["-W", "ignore"]
  turns = race(commands, chosen.steps)
  record = dataclasses.asdict(ratio(turns["two pods"], turns["one pod"]))
  for name in PROGRAMS:
    key = name.replace(" ", "_")
    record[f"{key}_secs"] = float(np.median([x.secs for x in turns[name]]))
    record[f"{key}_losses"] = [x.values["loss"] for x in turns[name]]
  yield record


def row(record: dict) -> str:
  """Returns a record as two lines of text."""
  one = np.array(record["one_pod_losses"])
  two = np.array(record["two_pods_losses"])
  disturbed = " (disturbed)" if record["is_disturbed"] else ""
  return (
    f"two pods / one pod  {record['median']:.3f}  "
    f"{record['low']:.3f} to {record['high']:.3f}  "
    f"{record['two_pods_secs']:.3f} / {record['one_pod_secs']:.3f} s  "
    f"{record['rounds']} rounds, {record['left_out']} left out{disturbed}\n"
    f"losses {one[0]:.4f} to {one[-1]:.4f}, apart by at most "
    f"{np.max(np.abs(two / one - 1)):.1e} of them"
  )
