# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the time and memory of building a training step's program.

  python tools/bench_graph.py
  python tools/bench_graph.py --mesh data:4,model:2 --layers 2 --layers 4 --json

--gin_file and --gin.NAME=VALUE are those of `palm_mtf train`. Results are on
stdout.
"""

# The recipe's program, PaLM 540B's by default, is built whole for each mesh and
# number of layers, in a process of its own. Nothing of it is run, so that no
# weight is ever in memory.

import argparse
import json
import sys
import time

from bench_command import (
  gin_flags,
  one_line_errors,
  print_measured,
  read_gin_arguments,
  train_config,
)

from palm_mtf.config import Config, mesh_layout
from palm_mtf.errors import check_count
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes

RECIPE = "recipes/palm_540b.gin"
MESHES = ["", "data:2", "data:2,model:2", "data:4,model:2", "data:4,model:4"]
LAYERS = [118]
# What layouts/palm_2d.gin splits, by the axis.
RULES = {
  "data": "batch:data,d_model_stored:data",
  "model": "heads:model,d_ff:model,vocab:model,d_model_residual:model",
}
_GIB = 2**30


def config_of(
  files: list[str], macros: list[str], mesh: str, num_layers: int
) -> Config:
  """Returns the settings of a run on a mesh, checked."""
  rules = [rule for axis, rule in RULES.items() if f"{axis}:" in mesh]
  macros = [
    "TEXT_FILES='none'",  # the recipe leaves it to the user; none is read
    f"MESH_SHAPE={mesh!r}",
    f"LAYOUT={','.join(rules)!r}",
    f"NUM_LAYERS={num_layers}",
    *macros,
  ]
  config = train_config(files, macros)
  sizes = config.run.batch_sizes.sizes
  num_pods = config.pods.num_pods
  mesh_layout.check_layout(
    config.mesh_layout, config.model, sizes[0], num_pods=num_pods
  )
  return config


def measure(config: Config) -> dict:
  """Builds in this process; returns seconds, bytes and operations."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.cpu_gpu import local_devices
  from palm_mtf.programs.train_program import build_train_program

  mesh, pods = config.mesh_layout, config.pods
  # The peak is that of the process, so that only a new process measures it.
  before = resident_bytes()
  # No session: variables and their initial values are operations alone.
  with tf.Graph().as_default() as graph:
    start = time.perf_counter()
    build_train_program(
      config.model,
      mesh,
      config.optimizer,
      batch_size=config.run.batch_sizes.sizes[0],
      seed=0,
      pods=pods,
      devices=local_devices(mesh.num_devices, pods.num_pods),
    )
    seconds = time.perf_counter() - start
    peak = largest_resident_bytes()
    return {
      "devices": mesh.num_devices * pods.num_pods,
      "build_secs": round(seconds, 2),
      "peak_bytes": peak,
      "before_bytes": before,  # TensorFlow's and Python's
      "operations": len(graph.get_operations()),
    }


def row(record: dict) -> str:
  """Returns a line of the table."""
  memory = [record[x] / _GIB for x in ("peak_bytes", "before_bytes")]
  return (
    f"{record['mesh'] or 'one device':<18}{record['devices']:>8}"
    f"{record['layers']:>8}{record['build_secs']:>10.1f}"
    f"{memory[0]:>8.2f}{memory[1]:>8.2f}{record['operations']:>13,}"
  )


@one_line_errors
def main() -> int:
  """Builds every program in a process of its own; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--mesh", action="append", help="a MESH_SHAPE; else 1 to 16 devices")
  add("--layers", action="append", type=int, help=f"by default {LAYERS[0]}")
  add("--measure", action="store_true", help=argparse.SUPPRESS)
  chosen, macros = read_gin_arguments(parser, RECIPE)
  for number in chosen.layers or []:
    check_count("--layers", number)
  pairs = [
    (mesh, num_layers)
    for num_layers in chosen.layers or LAYERS
    for mesh in (MESHES if chosen.mesh is None else chosen.mesh)
  ]
  files = chosen.gin_file or [RECIPE]
  # All of them are checked before the first is built.
  configs = [config_of(files, macros, *pair) for pair in pairs]
  if chosen.measure:
    print(json.dumps(measure(configs[0])))
    return 0
  flags = ["--measure", *gin_flags(files, macros)]
  return print_measured(
    __file__,
    [
      (
        {"mesh": mesh, "layers": num_layers},
        [f"--mesh={mesh}", f"--layers={num_layers}", *flags],
      )
      for mesh, num_layers in pairs
    ],
    head=f"{'mesh':<18}{'devices':>8}{'layers':>8}{'seconds':>10}{'GiB':>8}"
    f"{'before':>8}{'operations':>13}",
    row=row,
    as_json=chosen.json,
  )


if __name__ == "__main__":
  sys.exit(main())
