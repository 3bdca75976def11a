# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares T5's training step on two pods with that of one pod.

  python tools/bench_t5_pods.py
  python tools/bench_t5_pods.py --steps 100 --json

Results are on stdout.
"""

# The model is that of examples/t5_on_two_pods, larger. Three programs take
# turns, a step each, on the same rows and the same two virtual devices, which
# have a thread each:
#
#   one pod    the two devices are a mesh, "batch:data"; they all-reduce
#   two pods   each device is a pod; they exchange gradients
#   apart      each device is a pod for itself: no gradient leaves it
#
# "apart / one pod" is the step of two pods apart from the exchange: it has the
# all-reduce of one pod against it. "two pods / one pod" sets the exchange
# against that all-reduce.

import argparse
import concurrent.futures
import dataclasses
import json
import os
import sys
from collections.abc import Callable

import palm_mtf.pods  # isort: skip, makes Mesh TensorFlow importable

import gin
import numpy as np
from bench_command import one_line_errors
from bench_pairs import Program, alternate, ratio, take_turns
from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import tf
from palm_mtf.errors import check_count
from palm_mtf.mesh.host.devices import HostDevices
from palm_mtf.mesh.session import session_config
from palm_mtf.pods.model_function import ModelLoss
from palm_mtf.programs.train_program import build_program
from palm_mtf.training.step import TrainStep

GIN_FILE = os.path.join(
  os.path.dirname(__file__), "..", "examples", "t5_on_two_pods", "t5.gin"
)
# A tenth of T5-Small: large enough that a step is its matrix products.
SIZES = {
  "D_MODEL": 256,
  "D_FF": 1024,
  "NUM_HEADS": 4,
  "D_KV": 64,
  "NUM_LAYERS": 4,
}
VOCAB_SIZE, LENGTH, BATCH_SIZE = 4096, 128, 16
PROGRAMS = ("one pod", "two pods", "apart")
DEVICES = ("/device:cpu:0", "/device:cpu:1")
OPTIMIZER = palm_mtf.pods.AdafactorConfig(
  learning_rate=1e-2,
  beta1=0.0,
  beta2_exponent=0.8,
  update_clip=1.0,
  gradient_clip=1e9,
  weight_decay_exponent=None,
  z_loss=0.0,
  second_moment="factored",
  norm_scale="plain",
)


def t5_loss(mesh, features):
  """Returns the mean loss over all targets."""
  model = transformer.make_bitransformer(
    input_vocab_size=VOCAB_SIZE, output_vocab_size=VOCAB_SIZE
  )
  return model.call_simple(
    features["inputs"], features["targets"], compute_loss=True
  )[1]


def _step(
  session: tf.Session, pods: list[list[str]], batch_size: int
) -> Callable[[dict, int], dict[str, float]]:
  """Returns a function that trains on a batch, on pods of these devices."""
  is_split = len(pods[0]) > 1
  mesh = palm_mtf.pods.DeviceMesh(
    mesh_shape="data:2" if is_split else "",
    layout="batch:data" if is_split else "",
  )
  loss_function = ModelLoss(
    t5_loss,
    dict.fromkeys(("inputs", "targets"), ("int32", f"length:{LENGTH}")),
    mesh,
    num_rows=batch_size // len(pods),
    seed=0,
  )
  program = build_program(
    loss_function,
    mesh,
    OPTIMIZER,
    batch_size=batch_size,
    pods=palm_mtf.pods.PodsConfig(num_pods=len(pods)),
    devices=HostDevices(DEVICES[0], pods),
  )
  session.run(program.initialize)
  return TrainStep(session, program).run


def work(name: str) -> None:
  """Takes turns: a training step each."""
  gin.parse_config_file(GIN_FILE)
  gin.parse_config([f"{name} = {size}" for name, size in SIZES.items()])
  rng = np.random.default_rng(0)
  tokens = rng.integers(1, VOCAB_SIZE, (BATCH_SIZE, LENGTH), np.int32)
  batch = {"inputs": tokens, "targets": tokens}
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(1, len(DEVICES))) as session,
    concurrent.futures.ThreadPoolExecutor(len(DEVICES)) as clients,
  ):
    if name == "apart":
      share = BATCH_SIZE // len(DEVICES)
      parts = [
        {key: rows[i * share : (i + 1) * share] for key, rows in batch.items()}
        for i in range(len(DEVICES))
      ]
      runs = [_step(session, [[device]], share) for device in DEVICES]
    else:
      pods = [list(DEVICES)] if name == "one pod" else [[x] for x in DEVICES]
      parts, runs = [batch], [_step(session, pods, BATCH_SIZE)]
    number = 0

    def turn() -> dict[str, float]:
      nonlocal number
      number += 1
      steps = clients.map(lambda run, part: run(part, number), runs, parts)
      losses = [metrics["loss"] for metrics in steps]
      return {"loss": float(np.mean(losses))}

    for _ in range(3):  # compiles, and fills caches; no turn
      turn()
    take_turns(turn, {})


def compare(rounds: int) -> list[dict[str, object]]:
  """Returns the ratios of both other programs' seconds to one pod's."""
  command = [sys.executable, __file__, "--worker"]
  with (
    Program(PROGRAMS[0], [*command, PROGRAMS[0]]) as one,
    Program(PROGRAMS[1], [*command, PROGRAMS[1]]) as two,
    Program(PROGRAMS[2], [*command, PROGRAMS[2]]) as apart,
  ):
    turns = alternate([one, two, apart], rounds)
  to = turns[PROGRAMS[0]]
  return [
    {
      "program": name,
      "to": PROGRAMS[0],
      **dataclasses.asdict(ratio(turns[name], to)),
      "secs": float(np.median([turn.secs for turn in turns[name]])),
      "secs_to": float(np.median([turn.secs for turn in to])),
      "loss": turns[name][-1].values["loss"],
      "loss_to": to[-1].values["loss"],
    }
    for name in PROGRAMS[1:]
  ]


def line(record: dict[str, object]) -> str:
  """Returns a record as a line of text."""
  text = (
    f"{record['program']:>8} / {record['to']}  {record['median']:.3f}  "
    f"{record['low']:.3f} to {record['high']:.3f}  "
    f"{record['secs']:.3f} / {record['secs_to']:.3f} s  "
    f"loss {record['loss']:.5f} / {record['loss_to']:.5f}  "
    f"{record['rounds']} rounds, {record['left_out']} left out"
  )
  return text + (" (disturbed)" if record["is_disturbed"] else "")


@one_line_errors
def main() -> int:
  """Compares; or, as a worker, takes the turns of one program."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--steps", type=int, default=100, help="timed steps of each program")
  add("--worker", choices=PROGRAMS, help=argparse.SUPPRESS)
  add("--json", action="store_true", help="print one object a line")
  chosen = parser.parse_args()
  check_count("--steps", chosen.steps)
  if chosen.worker:
    work(chosen.worker)
    return 0
  for record in compare(chosen.steps):
    print(json.dumps(record) if chosen.json else line(record), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
