# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares layouts: bytes moved, memory, seconds of a step.

  python tools/bench_layouts.py
  python tools/bench_layouts.py --layout "fully sharded" --steps 20 --json

Each layout trains the recipe's model in a process of its own, on virtual
devices of this machine. Bytes moved in a step, of all devices together, are
counted in the lowered program; what a device keeps is the closed form; the peak
is what the process held more than before it built the program, all devices
together. The devices share this machine's cores: seconds compare what layouts
cost besides the arithmetic, which is the same in all of them, and say nothing
of a network. --gin_file and --gin.NAME=VALUE are those of `palm_mtf train`.
Results are on stdout.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import numpy as np

from palm_mtf.accounting.memory import device_bytes
from palm_mtf.config import Config, mesh_layout
from palm_mtf.errors import UserError, check_choice, check_count
from palm_mtf.machine.host_memory import largest_resident_bytes, resident_bytes

# Beside this file; nothing else puts the folder on the path under pytest.
sys.path.append(str(Path(__file__).resolve().parent))
from bench_command import macros_of, measured, train_config

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


def read_arguments() -> tuple[argparse.Namespace, list[str]]:
  """Returns the command line's choices, and macros as gin wants them."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--gin_file", action="append", help=f"by default {RECIPE}")
  add("--layout", action="append", help=f"of {', '.join(LAYOUTS)}; else all")
  add("--steps", type=int, default=5, help="timed")
  add("--json", action="store_true", help="print one object a line")
  add("--measure", action="store_true", help=argparse.SUPPRESS)
  chosen, others = parser.parse_known_args()
  check_count("--steps", chosen.steps)
  for name in chosen.layout or []:
    check_choice("--layout", name, LAYOUTS)
  return chosen, macros_of(others)


def config_of(chosen: argparse.Namespace, macros: list[str], name: str):
  """Returns the settings of a run in one of LAYOUTS, checked."""
  mesh_shape, rules = LAYOUTS[name]
  macros = [
    "MODEL_DIR='none'",  # nothing is written
    f"MESH_SHAPE={mesh_shape!r}",
    f"LAYOUT={rules!r}",
    *macros,
  ]
  files = chosen.gin_file or [RECIPE]
  config = train_config(files, macros)
  batch_size = config.run.batch_sizes.sizes[0]
  mesh_layout.check(config.mesh_layout, config.model, batch_size)
  return config


def measure(config: Config, num_steps: int) -> dict:
  """Trains in this process; returns what the docstring says of it."""
  from palm_mtf._tf import tf
  from palm_mtf.mesh.session import session_config
  from palm_mtf.mesh.traffic import traffic
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.training.step import TrainStep

  model, mesh = config.model, config.mesh_layout
  optimizer = config.optimizer
  batch_size = config.run.batch_sizes.sizes[0]
  tokens = np.random.default_rng(0).integers(
    model.vocab_size, size=[batch_size, model.sequence_length]
  )
  before = resident_bytes()
  with (
    tf.Graph().as_default(),
    tf.Session(config=session_config(mesh.num_devices)) as session,
  ):
    program = build_train_program(
      model, mesh, optimizer, batch_size=batch_size, seed=0
    )
    moved = traffic([program.update, *program.metrics.values()])
    for _ in range(mesh.num_microbatches - 1):
      moved += traffic([pod.accumulate for pod in program.pods])
    session.run(program.initialize)
    run, times = TrainStep(session, program).run, []
    for step in range(_WARM_UP_STEPS + num_steps):
      start = time.perf_counter()
      run({"inputs": tokens, "targets": tokens}, step)
      times.append(time.perf_counter() - start)
  peak = largest_resident_bytes()
  kept = device_bytes(model, mesh, optimizer)
  return {
    "devices": mesh.num_devices,
    "moved_bytes": {
      f"{kind} {'.'.join(axes)}": size
      for (kind, axes), size in sorted(moved.items())
    },
    "weight_bytes": kept.weights,
    "slot_bytes": kept.slots,
    "gradient_bytes": kept.gradients,
    "peak_bytes": peak - before,
    "step_secs": round(statistics.median(times[_WARM_UP_STEPS:]), 4),
  }


def row(name: str, record: dict) -> str:
  """Returns a line of the table; bytes are in MB."""
  moved = dict.fromkeys(KINDS, 0)
  for key, size in record["moved_bytes"].items():
    moved[key.partition(" ")[0]] += size
  numbers = [
    *moved.values(),
    record["weight_bytes"] + record["slot_bytes"],
    record["gradient_bytes"],
    record["peak_bytes"],
  ]
  cells = "".join(f"{number / 1e6:>15,.1f}" for number in numbers)
  return f"{name:<15}{cells}{record['step_secs']:>10.3f}"


def main() -> int:
  """Returns the exit code."""
  try:
    chosen, macros = read_arguments()
    names = chosen.layout or list(LAYOUTS)
    configs = [config_of(chosen, macros, name) for name in names]
  except UserError as error:
    print(f"bench_layouts: {error}", file=sys.stderr)
    return 2
  if chosen.measure:
    print(json.dumps(measure(configs[0], chosen.steps)))
    return 0
  files = [f"--gin_file={file}" for file in chosen.gin_file or []]
  if not chosen.json:
    heads = [*KINDS, "weights+slots", "gradients", "peak, all"]
    print(f"{'MB':<15}{''.join(f'{x:>15}' for x in heads)}{'s/step':>10}")
  for name in names:
    record = measured(
      *(__file__, "--measure", f"--layout={name}", f"--steps={chosen.steps}"),
      *(*files, *(f"--gin.{macro}" for macro in macros)),
    )
    if record is None:
      return 1
    line = json.dumps({"layout": name, **record})
    print(line if chosen.json else row(name, record), flush=True)
  return 0


if __name__ == "__main__":
  sys.exit(main())
