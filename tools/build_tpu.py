# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds training programs of TPUs on any machine, and counts what they have.

  python tools/build_tpu.py
  python tools/build_tpu.py --gin_file=recipes/palm_8b.gin \
    --gin_file=layouts/tpu_v4_128.gin --gin.GLOBAL_BATCH_SIZE=64 --json
"""

# Without --gin_file a table: models and slices, each built in a process of its
# own. Nothing is compiled and nothing runs: XLA's part, and its memory on a
# device, are not seen here.

import argparse
import collections
import json
import sys
import time
from typing import TYPE_CHECKING

from bench_command import (
  gin_flags,
  one_line_errors,
  print_measured,
  read_gin_arguments,
  train_config,
)

from palm_mtf.config import Config, mesh_layout
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import largest_resident_bytes

if TYPE_CHECKING:
  from palm_mtf._tf import tf
  from palm_mtf.programs.train_program import TrainProgram

# Gin files and macros.
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
# microbatch before its last, and the loss of other batches; not in loops of
# steps.
KINDS = ("CrossReplicaSum", "XlaAllReduce", "XlaReduceScatter")


def config_of(files: list[str], macros: list[str]) -> Config:
  """Returns the settings of a run, checked.

  Raises:
    UserError: they do not go together, or have no TPU.
  """
  # A recipe leaves its text to the user; none is read.
  config = train_config(files, ["TASK=None", "TEXT_FILES='none'", *macros])
  mesh, sizes = config.mesh_layout, config.run.batch_sizes.sizes
  if not mesh.tpu:
    raise UserError("TPU is not set: add a --gin_file=layouts/tpu_*.gin.")
  mesh_layout.check_layout(
    mesh, config.model, *sizes, num_pods=config.pods.num_pods
  )
  return config


def program_of(config: Config) -> tuple["tf.Graph", "TrainProgram"]:
  """Builds a training program in a graph of its own."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.tpu.devices import tpu_devices, tpu_topology
  from palm_mtf.programs.train_program import build_train_program

  mesh, pods = config.mesh_layout, config.pods
  # The topology is computed: no TPU is asked for it.
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
  graph, _ = program_of(config)
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
    # Of all programs, and of what is around them.
    "operations": len(operations),
  }
  return numbers | {kind: counts[kind] for kind in KINDS}


@one_line_errors
def main() -> int:
  """Builds one program, or the table's; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  chosen, macros = read_gin_arguments(parser, "a table")
  if chosen.gin_file:
    print(json.dumps(build(config_of(chosen.gin_file, macros))))
    return 0
  for files, own in ROWS:
    config_of(files, [*own, *macros])
  heads = ("tpu", "devices", "layers", "pods", "build_secs", "gib")
  return print_measured(
    __file__,
    [({}, gin_flags(files, [*own, *macros])) for files, own in ROWS],
    head="".join(f"{x:>17}" for x in (*heads, "operations", *KINDS)),
    row=lambda record: "".join(f"{x:>17}" for x in record.values()),
    as_json=chosen.json,
  )


if __name__ == "__main__":
  sys.exit(main())
