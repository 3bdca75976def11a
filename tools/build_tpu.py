# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds the training program of TPUs, on any machine, and counts what it has.

  python tools/build_tpu.py
  python tools/build_tpu.py --gin_file=recipes/palm_8b.gin \
    --gin_file=layouts/tpu_v4_128.gin --gin.GLOBAL_BATCH_SIZE=64 --json

Without --gin_file a table: models and slices, each built in a process of its
own. Nothing is compiled and nothing runs: XLA's part, and its memory on a
device, are not seen here. Operations are those of all programs and those around
them; collectives are those of one device of each pod, in all its programs: the
step, a microbatch before its last, and the loss of other batches; not in loops
of steps.
"""

import argparse
import collections
import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from palm_mtf.config import Config, mesh_layout
from palm_mtf.config.tpu_topology import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.machine.host_memory import largest_resident_bytes

if TYPE_CHECKING:
  from palm_mtf._tf import tf
  from palm_mtf.programs.train_program import TrainProgram

# Beside this file; nothing else puts the folder on the path under pytest.
sys.path.append(str(Path(__file__).resolve().parent))
from bench_command import macros_of, measured, train_config

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
# What a recipe leaves to the user, and this does not need.
_UNUSED = ["MODEL_DIR='none'", "TEXT_FILES='none'"]
KINDS = ("CrossReplicaSum", "XlaAllReduce", "XlaReduceScatter")


def config_of(files: list[str], macros: list[str]) -> Config:
  """Returns the settings of a run, checked.

  Raises:
    UserError: they do not go together, or have no TPU.
  """
  config = train_config(files, [*_UNUSED, *macros])
  mesh, sizes = config.mesh_layout, config.run.batch_sizes.sizes
  if not mesh.tpu:
    raise UserError("TPU is not set: add a --gin_file=layouts/tpu_*.gin.")
  mesh_layout.check(mesh, config.model, *sizes, num_pods=config.pods.num_pods)
  return config


def program_of(config: Config) -> tuple["tf.Graph", "TrainProgram"]:
  """Builds a training program in a graph of its own."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.tpu.devices import tpu_devices, tpu_topology
  from palm_mtf.programs.train_program import build_train_program

  mesh, pods = config.mesh_layout, config.pods
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
  """Builds a training program; returns what it is and what that took."""
  start = time.perf_counter()
  graph, _ = program_of(config)
  secs = time.perf_counter() - start
  operations = graph.get_operations()
  counts = collections.Counter(op.type for op in operations if op.type in KINDS)
  return {
    "tpu": config.mesh_layout.tpu,
    "devices": config.mesh_layout.num_devices,
    "layers": config.model.num_layers,
    "pods": config.pods.num_pods,
    "build_secs": round(secs, 1),
    "gib": round(largest_resident_bytes() / 2**30, 2),
    "operations": len(operations),
    **{kind: counts[kind] for kind in KINDS},
  }


def main() -> int:
  """Returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--gin_file", action="append", help="else a table")
  parser.add_argument("--json", action="store_true", help="one object a line")
  chosen, others = parser.parse_known_args()
  try:
    macros = macros_of(others)
    if chosen.gin_file:
      print(json.dumps(build(config_of(chosen.gin_file, macros))))
      return 0
    for files, own in ROWS:
      config_of(files, [*own, *macros])
  except UserError as error:
    print(f"build_tpu: {error}", file=sys.stderr)
    return 2
  return _print_table(macros, as_json=chosen.json)


def _print_table(macros: list[str], *, as_json: bool) -> int:
  """Builds each of ROWS in a process of its own; returns the exit code."""
  for i, (files, own) in enumerate(ROWS):
    found = measured(
      __file__,
      *(f"--gin_file={file}" for file in files),
      *(f"--gin.{macro}" for macro in (*own, *macros)),
    )
    if found is None:
      return 1
    if as_json:
      print(json.dumps(found), flush=True)
      continue
    if not i:
      print("".join(f"{x:>17}" for x in found))
    print("".join(f"{x:>17}" for x in found.values()), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
