# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares layouts: bytes moved, memory, seconds of a step.

  python tools/bench_layouts.py
  python tools/bench_layouts.py --layout "fully sharded" --steps 20 --json

--gin_file and --gin.NAME=VALUE are those of `palm_mtf train`. Results are on
stdout.
"""

# Each layout trains the recipe's model in a process of its own, on virtual
# devices, which share this machine's cores: seconds compare what layouts cost
# besides the arithmetic, which is the same in all of them, and say nothing of a
# network.

import argparse
import json
import statistics
import sys

from bench_command import (
  gin_flags,
  one_line_errors,
  print_measured,
  random_tokens,
  read_gin_arguments,
  seconds_of,
  train_config,
)
from bench_program import training_program

from palm_mtf.accounting.memory import device_bytes
from palm_mtf.config import Config, mesh_layout
from palm_mtf.errors import check_choice, check_count
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes

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
_WARM_UP_STEPS = 2  # not timed: the first compiles


def config_of(files: list[str], macros: list[str], name: str) -> Config:
  """Returns the settings of a run in one of LAYOUTS, checked."""
  mesh_shape, rules = LAYOUTS[name]
  macros = [f"MESH_SHAPE={mesh_shape!r}", f"LAYOUT={rules!r}", *macros]
  config = train_config(files, macros)
  batch_size = config.run.batch_sizes.sizes[0]
  mesh_layout.check_layout(config.mesh_layout, config.model, batch_size)
  return config


def measure(config: Config, num_steps: int) -> dict:
  """Trains in this process; returns bytes moved and kept, and seconds."""
  from palm_mtf.training.step import TrainStep
  from tools.traffic import traffic

  model, mesh = config.model, config.mesh_layout
  optimizer = config.optimizer
  batch_size = config.run.batch_sizes.sizes[0]
  tokens = random_tokens(model, batch_size)
  batch = {"inputs": tokens, "targets": tokens}
  before = resident_bytes()
  with training_program(
    model, optimizer, batch_size=batch_size, mesh_layout=mesh
  ) as (session, program):
    # Bytes are counted in the lowered program, of all devices together. All
    # microbatches but the last add up gradients in a program of their own.
    moved = traffic([program.update, *program.metrics.values()])
    for _ in range(mesh.num_microbatches - 1):
      moved += traffic([pod.accumulate for pod in program.pods])
    run = TrainStep(session, program).run
    times = [
      seconds_of(run, batch, step) for step in range(_WARM_UP_STEPS + num_steps)
    ]
  peak = largest_resident_bytes()
  kept = device_bytes(model, mesh, optimizer)  # of one device, closed form
  return {
    "devices": mesh.num_devices,
    "moved_bytes": {
      f"{kind} {'.'.join(axes)}": size
      for (kind, axes), size in sorted(moved.items())
    },
    "weight_bytes": kept.weights,
    "slot_bytes": kept.slots,
    "gradient_bytes": kept.gradients,
    # Of all devices together, without what TensorFlow held before.
    "peak_bytes": peak - before,
    "step_secs": round(statistics.median(times[_WARM_UP_STEPS:]), 4),
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


@one_line_errors
def main() -> int:
  """Compares, or in a process of its own measures; returns the exit code."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--layout", action="append", help=f"of {', '.join(LAYOUTS)}; else all")
  add("--steps", type=int, default=5, help="timed")
  add("--measure", action="store_true", help=argparse.SUPPRESS)
  chosen, macros = read_gin_arguments(parser, RECIPE)
  check_count("--steps", chosen.steps)
  names = chosen.layout or list(LAYOUTS)
  for name in names:
    check_choice("--layout", name, LAYOUTS)
  files = chosen.gin_file or [RECIPE]
  # All of them are checked before the first is measured.
  configs = [config_of(files, macros, name) for name in names]
  if chosen.measure:
    print(json.dumps(measure(configs[0], chosen.steps)))
    return 0
  flags = ["--measure", f"--steps={chosen.steps}", *gin_flags(files, macros)]
  heads = [*KINDS, "weights+slots", "gradients", "peak, all"]
  return print_measured(
    __file__,
    [({"layout": name}, [f"--layout={name}", *flags]) for name in names],
    head=f"{'MB':<15}{''.join(f'{x:>15}' for x in heads)}{'s/step':>10}",
    row=row,
    as_json=chosen.json,
  )


if __name__ == "__main__":
  sys.exit(main())
