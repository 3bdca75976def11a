# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures the time and memory of building a training step's program.

  python -m tools.bench graph
  python -m tools.bench graph --mesh data:4,model:2 --layers 2 --layers 4 --json

--gin_file and --gin.NAME=VALUE are the flags of `palm_mtf train`.
"""

# The whole program of the recipe, by default PaLM 540B's, is built in a
# separate process for each mesh and number of layers. The program never runs,
# so no weight is ever in memory.

import argparse
import time
from collections.abc import Iterator

from palm_mtf.config import Config, mesh_layout
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
from tools.bench.command import (
  SEVERAL,
  Flag,
  count,
  measure_apart,
  train_config,
)

RECIPE = "recipes/palm_540b.gin"
MESHES = ["", "data:2", "data:2,model:2", "data:4,model:2", "data:4,model:4"]
NUM_LAYERS = 118  # PaLM 540B's
# The rules of layouts/palm_2d.gin, by mesh axis.
RULES = {
  "data": "batch:data,d_model_stored:data",
  "model": "heads:model,d_ff:model,vocab:model,d_model_residual:model",
}
_GIB = 2**30
HEAD = (
  f"{'mesh':<18}{'devices':>8}{'layers':>8}{'seconds':>10}{'GiB':>8}"
  f"{'before':>8}{'operations':>13}"
)
FLAGS = {
  "--mesh": Flag(None, "a MESH_SHAPE; else 1 to 16 devices", settings=SEVERAL),
  "--layers": Flag(None, f"number; else {NUM_LAYERS}", count(), SEVERAL),
}


def make_config(
  mesh: str, num_layers: int, files: list[str], macros: list[str]
) -> Config:
  """Returns the settings of a run on a mesh, checked."""
  rules = [rule for axis, rule in RULES.items() if f"{axis}:" in mesh]
  defaults = [
    "TEXT_FILES='none'",  # the recipe does not set it; no text is read
    f"MESH_SHAPE={mesh!r}",
    f"LAYOUT={','.join(rules)!r}",
    f"NUM_LAYERS={num_layers}",
  ]
  config = train_config(files, macros, defaults)
  sizes = config.run.batch_sizes.sizes
  num_pods = config.pods.num_pods
  mesh_layout.check_layout(
    config.mesh_layout, config.model, sizes[0], num_pods=num_pods
  )
  return config


def work(
  files: list[str], macros: list[str], mesh_shape: str, num_layers: int
) -> dict:
  """Builds in this process; returns seconds, bytes and operations."""
  config = make_config(mesh_shape, num_layers, files, macros)
  from palm_mtf._tf import tf
  from palm_mtf.mesh.cpu_gpu import local_devices
  from palm_mtf.programs.train_program import build_train_program

  mesh, pods = config.mesh_layout, config.pods
  # A new process is needed, because the peak counts the whole process.
  before = resident_bytes()
  # Without a session, variables and their initial values are only operations.
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


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per number of layers and mesh."""
  pairs = [
    (mesh, num_layers)
    for num_layers in chosen.layers or [NUM_LAYERS]
    for mesh in (MESHES if chosen.mesh is None else chosen.mesh)
  ]
  # All pairs are checked before the first program is built.
  for pair in pairs:
    make_config(*pair, **chosen.gin)
  for mesh, num_layers in pairs:
    built = measure_apart(
      "graph",
      **chosen.gin,
      mesh_shape=mesh,
      num_layers=num_layers,
    )
    yield {"mesh": mesh, "layers": num_layers, **built}


def row(record: dict) -> str:
  """Returns a line of the table."""
  memory = [record[x] / _GIB for x in ("peak_bytes", "before_bytes")]
  return (
    f"{record['mesh'] or 'one device':<18}{record['devices']:>8}"
    f"{record['layers']:>8}{record['build_secs']:>10.1f}"
    f"{memory[0]:>8.2f}{memory[1]:>8.2f}{record['operations']:>13,}"
  )
