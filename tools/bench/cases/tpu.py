# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds training programs for TPUs on any machine; counts their collectives.

  python -m tools.bench tpu
  python -m tools.bench tpu --gin_file=recipes/palm_8b.gin \\
    --gin_file=layouts/tpu_v4_128.gin --gin.GLOBAL_BATCH_SIZE=64 --json
"""

# Without --gin_file it prints a table of models and slices, each built in a
# separate process. Nothing is compiled and nothing runs, so XLA's part, and its
# memory on a device, are not measured.

import argparse
import collections
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from palm_mtf.config import Config, mesh_layout
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import largest_resident_bytes
from tools.bench.command import measure_apart, train_config

if TYPE_CHECKING:
  from palm_mtf._tf import tf
  from palm_mtf.programs.train_program import TrainProgram

# Gin files and macros of each row of the table.
ROWS = [
  (["recipes/quickstart.gin", "layouts/tpu_v3_8.gin"], ["NUM_PODS=1"]),
  (
    ["recipes/quickstart.gin", "layouts/tpu_v3_8.gin"],
    ["NUM_PODS=1", "STEPS_PER_LOOP=100"],
  ),
  (["recipes/quickstart.gin", "layouts/tpu_v4_8.gin"], ["NUM_PODS=2"]),
  (["recipes/palm_8b.gin", "layouts/tpu_v3_32.gin"], ["NUM_PODS=1"]),
  (["recipes/palm_8b.gin", "layouts/tpu_v4_128.gin"], ["NUM_PODS=1"]),
  (["recipes/palm_62b.gin", "layouts/tpu_v4_128.gin"], ["NUM_PODS=1"]),
  (["recipes/palm_540b.gin", "layouts/tpu_palm_540b.gin"], ["NUM_PODS=1"]),
  (["recipes/palm_540b.gin", "layouts/tpu_palm_540b.gin"], ["NUM_PODS=2"]),
]
# Collectives of one device of each pod, in all its programs: the step, a
# microbatch before the last microbatch, and the loss of other batches. Loops of
# several steps are not counted.
KINDS = ("CrossReplicaSum", "XlaAllReduce", "XlaReduceScatter")
_NUMBERS = ("tpu", "devices", "layers", "pods", "build_secs", "gib")
HEAD = "".join(f"{x:>17}" for x in (*_NUMBERS, "operations", *KINDS))
RECIPE = ""  # none: a table


def make_config(files: list[str], macros: list[str]) -> Config:
  """Returns the settings of a run, checked.

  Raises:
    UserError: if they do not go together, or have no TPU.
  """
  # A recipe leaves its text to the user; no text is read.
  config = train_config(files, macros, ["TASK=None", "TEXT_FILES='none'"])
  mesh, sizes = config.mesh_layout, config.run.batch_sizes.sizes
  if not mesh.tpu:
    raise UserError("TPU is not set: add a --gin_file=layouts/tpu_*.gin.")
  mesh_layout.check_layout(
    mesh, config.model, *sizes, num_pods=config.pods.num_pods
  )
  return config


def build_program(config: Config) -> tuple["tf.Graph", "TrainProgram"]:
  """Builds a training program in a new graph."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.tpu.devices import tpu_devices, tpu_topology
  from palm_mtf.programs.train_program import build_train_program

  mesh, pods = config.mesh_layout, config.pods
  # The topology is computed, so no TPU is needed.
  where = tpu_slice(mesh.tpu)
  jobs = [f"pod_{i}" for i in range(pods.num_pods)]
  devices = tpu_devices(
    mesh,
    where,
    [tpu_topology(where)] * len(jobs),
    jobs=jobs,
    client="/job:client/task:0/device:cpu:0",
  )
  with tf.Graph().as_default() as graph:
    program = build_train_program(
      config.model,
      mesh,
      config.optimizer,
      batch_size=config.run.batch_sizes.sizes[0],
      seed=0,
      pods=pods,
      devices=devices,
    )
  return graph, program


def build(config: Config) -> dict[str, object]:
  """Builds a training program; returns its size, and seconds and GiB taken."""
  start = time.perf_counter()
  graph, _ = build_program(config)
  secs = time.perf_counter() - start
  operations = graph.get_operations()
  counts = collections.Counter(op.type for op in operations if op.type in KINDS)
  numbers = {
    "tpu": config.mesh_layout.tpu,
    "devices": config.mesh_layout.num_devices,
    "layers": config.model.num_layers,
    "pods": config.pods.num_pods,
    "build_secs": round(secs, 1),
    "gib": round(largest_resident_bytes() / 2**30, 2),
    # In all programs, and around them.
    "operations": len(operations),
  }
  return numbers | {kind: counts[kind] for kind in KINDS}


FLAGS = {}  # gin files and macros are the only choices


def work(files: list[str], macros: list[str]) -> dict[str, object]:
  """Builds the program of gin files in this process."""
  return build(make_config(files, macros))


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields the record of the chosen program, or of every row of the table."""
  table = [chosen.gin]
  if not chosen.gin["files"]:
    given = chosen.gin["macros"]
    table = [{"files": x, "macros": [*own, *given]} for x, own in ROWS]
  for gin in table:
    make_config(**gin)  # checks all before the first is built
  for gin in table:
    yield measure_apart("tpu", **gin)


def row(record: dict) -> str:
  """Returns a line of the table."""
  return "".join(f"{x:>17}" for x in record.values())
