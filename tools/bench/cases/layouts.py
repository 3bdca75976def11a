# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares layouts: bytes moved, memory, seconds per step.

  python -m tools.bench layouts
  python -m tools.bench layouts --layout "fully sharded" --steps 20 --json

--gin_file and --gin.NAME=VALUE are the flags of `palm_mtf train`.
"""

# Each layout trains the recipe's model in a separate process, on virtual
# devices that share this machine's cores. The arithmetic is the same in all
# layouts, so seconds compare all other costs of a layout, except those of a
# network.

import argparse
import statistics
from collections.abc import Iterator

from palm_mtf.accounting.memory import device_bytes
from palm_mtf.config import Config, mesh_layout
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes
from tools.bench.command import (
  SEVERAL,
  Flag,
  measure_apart,
  train_config,
)
from tools.bench.models import WARM_UP_STEPS, random_tokens, training_program
from tools.bench.pairs import time_call

RECIPE = "recipes/quickstart.gin"
_WORK = "heads:model,d_ff:model,vocab:model"
_MEMORY = "d_model_stored:data,d_model_residual:model"
LAYOUTS = {
  "single": ("", ""),
  "data parallel": ("data:4", "batch:data"),
  "fully sharded": ("data:4", "batch:data,d_model_stored:data"),
  "model parallel": ("model:4", _WORK),
  "both": ("data:2,model:2", f"batch:data,{_WORK}"),
  "PaLM's 2D": ("data:2,model:2", f"batch:data,{_WORK},{_MEMORY}"),
}
KINDS = ("all_reduce", "reduce_scatter", "all_gather")
_COLUMNS = (*KINDS, "weights+slots", "gradients", "peak, all")
HEAD = f"{'MB':<15}{''.join(f'{x:>15}' for x in _COLUMNS)}{'s/step':>10}"
FLAGS = {
  "--layout": Flag(
    None, f"one of {', '.join(LAYOUTS)}; else all", LAYOUTS, SEVERAL
  ),
  "--steps": Flag(5, "number of timed steps"),
}


def make_config(name: str, files: list[str], macros: list[str]) -> Config:
  """Returns the settings of a run in one of LAYOUTS, checked."""
  mesh_shape, rules = LAYOUTS[name]
  defaults = [f"MESH_SHAPE={mesh_shape!r}", f"LAYOUT={rules!r}"]
  config = train_config(files, macros, defaults)
  batch_size = config.run.batch_sizes.sizes[0]
  mesh_layout.check_layout(config.mesh_layout, config.model, batch_size)
  return config


def work(
  files: list[str], macros: list[str], layout: str, num_steps: int
) -> dict:
  """Trains in this process; returns bytes moved and kept, and seconds."""
  from palm_mtf.runtime.client.client import Client
  from palm_mtf.training.step import TrainStep
  from tools.traffic import traffic

  config = make_config(layout, files, macros)
  model, mesh = config.model, config.mesh_layout
  optimizer = config.optimizer
  batch_size = config.run.batch_sizes.sizes[0]
  tokens = random_tokens(model, batch_size)
  batch = {"inputs": tokens, "targets": tokens}
  before = resident_bytes()
  with training_program(
    model, optimizer, batch_size=batch_size, mesh_layout=mesh
  ) as (session, program):
    # Bytes are counted in the lowered program, for all devices together. All
    # microbatches but the last add their gradients in a separate program.
    moved = traffic([program.update, *program.metrics.values()])
    for _ in range(mesh.num_microbatches - 1):
      moved += traffic([pod.stages[0].forward for pod in program.pods])
    run = TrainStep(Client(session), program).run
    times = [
      time_call(run, batch, step) for step in range(WARM_UP_STEPS + num_steps)
    ]
  peak = largest_resident_bytes()
  kept = device_bytes(model, mesh, optimizer)  # per device, closed form
  return {
    "devices": mesh.num_devices,
    "moved_bytes": {
      f"{kind} {'.'.join(axes)}": size
      for (kind, axes), size in sorted(moved.items())
    },
    "weight_bytes": kept.weights,
    "slot_bytes": kept.slots,
    "gradient_bytes": kept.gradients,
    # For all devices together, without the memory that TensorFlow held before.
    "peak_bytes": peak - before,
    "step_secs": round(statistics.median(times[WARM_UP_STEPS:]), 4),
  }


def row(record: dict) -> str:
  """Returns a line of the table; bytes are in MB."""
  moved = dict.fromkeys(KINDS, 0)
  for key, size in record["moved_bytes"].items():
    moved[key.partition(" ")[0]] += size  # over all axes
  numbers = [
    *moved.values(),
    record["weight_bytes"] + record["slot_bytes"],
    record["gradient_bytes"],
    record["peak_bytes"],
  ]
  cells = "".join(f"{number / 1e6:>15,.1f}" for number in numbers)
  return f"{record['layout']:<15}{cells}{record['step_secs']:>10.3f}"


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per layout."""
  names = chosen.layout or list(LAYOUTS)
  # All layouts are checked before the first is measured.
  for name in names:
    make_config(name, **chosen.gin)
  for name in names:
    measured = measure_apart(
      "layouts",
      **chosen.gin,
      layout=name,
      num_steps=chosen.steps,
    )
    yield {"layout": name, **measured}
