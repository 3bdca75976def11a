# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how long the program of a training step takes to build, and memory.

  python tools/bench_graph.py
  python tools/bench_graph.py --mesh data:4,model:2 --layers 2 --layers 4 --json

The recipe's program, PaLM 540B's unless another is named, is built whole for
each mesh and number of layers, each time in a process of its own, and nothing
of it is run: no weight is ever in memory. A mesh splits over its axes what
layouts/palm_2d.gin does. Printed are the seconds that building took, the most
memory that the process ever held, what of that TensorFlow and Python held
before, and the number of operations. --gin_file and --gin.NAME=VALUE are those
of `palm_mtf train`. Results are on stdout.
"""

import argparse
import json
import sys
import time
from pathlib import Path

from palm_mtf.config import Config, mesh_layout
from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes

# Beside this file; nothing else puts the folder on the path under pytest.
sys.path.append(str(Path(__file__).resolve().parent))
from bench_command import macros_of, measured, train_config

RECIPE = "recipes/palm_540b.gin"
MESHES = ["", "data:2", "data:2,model:2", "data:4,model:2", "data:4,model:4"]
LAYERS = [118]
RULES = {
  "data": "batch:data,d_model_stored:data",
  "model": "heads:model,d_ff:model,vocab:model,d_model_residual:model",
}
_GIB = 2**30


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
  """Returns the command line's choices, and macros as gin wants them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--gin_file", action="append", help=f"by default {RECIPE}")
  add("--mesh", action="append", help="a MESH_SHAPE; else 1 to 16 devices")
  add("--layers", action="append", type=int, help=f"by default {LAYERS[0]}")
  add("--json", action="store_true", help="print one object a line")
  add("--measure", action="store_true", help=argparse.SUPPRESS)
  chosen, others = parser.parse_known_args()
  for number in chosen.layers or []:
    check_count("--layers", number)
  return chosen, macros_of(others)


def config_of(
  chosen: argparse.Namespace, macros: list[str], mesh: str, num_layers: int
) -> Config:
  """Returns the settings of a run on a mesh, checked."""
  rules = [rule for axis, rule in RULES.items() if f"{axis}:" in mesh]
  macros = [
    "MODEL_DIR='none'",  # nothing is written
    "TEXT_FILES='none'",  # nor read
    f"MESH_SHAPE={mesh!r}",
    f"LAYOUT={','.join(rules)!r}",
    f"NUM_LAYERS={num_layers}",
    *macros,
  ]
  files = chosen.gin_file or [RECIPE]
  config = train_config(files, macros)
  sizes = config.run.batch_sizes.sizes
  num_pods = config.pods.num_pods
  mesh_layout.check(
    config.mesh_layout, config.model, sizes[0], num_pods=num_pods
  )
  return config


def measure(config: Config) -> dict:
  """Builds in this process; returns what the docstring says of it."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.host.devices import local_devices
  from palm_mtf.programs.train_program import build_train_program

  mesh, pods = config.mesh_layout, config.pods
  before = resident_bytes()
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
      "before_bytes": before,
      "operations": len(graph.get_operations()),
    }


def row(mesh: str, num_layers: int, record: dict) -> str:
  """Returns a line of the table."""
  memory = [record[x] / _GIB for x in ("peak_bytes", "before_bytes")]
  return (
    f"{mesh or 'one device':<18}{record['devices']:>8}{num_layers:>8}"
    f"{record['build_secs']:>10.1f}{memory[0]:>8.2f}{memory[1]:>8.2f}"
    f"{record['operations']:>13,}"
  )


def main() -> int:
  """Returns the exit code."""
  try:
    chosen, macros = read_arguments()
    rows = [
      (mesh, num_layers)
      for num_layers in chosen.layers or LAYERS
      for mesh in (MESHES if chosen.mesh is None else chosen.mesh)
    ]
    configs = [config_of(chosen, macros, *each) for each in rows]
  except UserError as error:
    print(f"bench_graph: {error}", file=sys.stderr)
    return 2
  if chosen.measure:
    print(json.dumps(measure(configs[0])))
    return 0
  files = [f"--gin_file={file}" for file in chosen.gin_file or []]
  if not chosen.json:
    print(
      f"{'mesh':<18}{'devices':>8}{'layers':>8}{'seconds':>10}{'GiB':>8}"
      f"{'before':>8}{'operations':>13}"
    )
  for mesh, num_layers in rows:
    record = measured(
      *(__file__, "--measure", f"--mesh={mesh}", f"--layers={num_layers}"),
      *(*files, *(f"--gin.{macro}" for macro in macros)),
    )
    if record is None:
      return 1
    line = json.dumps({"mesh": mesh, "layers": num_layers, **record})
    print(line if chosen.json else row(mesh, num_layers, record), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
