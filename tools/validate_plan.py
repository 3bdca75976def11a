# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares plans for this machine with training steps on it.

  palm_mtf plan --calibrate
  python -m tools.validate_plan
  python -m tools.validate_plan --case "26.6M bf16" --json
  python -m tools.validate_plan --write      into docs/predictions.md

The machine should do nothing else. Results are on stdout, progress on stderr.
"""

# The calibration trains none of these models. Each model trains in a separate
# process, and each pod in a process with one core. A few processes live at the
# same time and take turns, one step per turn. The rule was fixed before the
# first table: the seconds of a step are divided by the slowdown, which is the
# time of products right before and after the step, divided by the best
# calibrated time (rates/calibration.py). The median of TURNS counts. For pods,
# the time is the processor time of the busier process. The table has the median
# slowdown; of several runs, a row keeps the run with the smallest slowdown.
# Layouts split virtual devices that share cores, so only their memory and bytes
# are compared, not their time.

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_mtf.accounting.communication import dcn_bytes
from palm_mtf.accounting.plan import memory_parts
from palm_mtf.accounting.step_time import predict_step
from palm_mtf.cli import gin_files
from palm_mtf.commands.plan import check_settings
from palm_mtf.config import PlanConfig
from palm_mtf.errors import check_choice
from palm_mtf.machine.compiled_code import keep_compiled_code
from palm_mtf.machine.host_memory import largest_resident_bytes
from palm_mtf.machine.process import own_process
from tools.bench.command import one_line_errors
from tools.bench.models import SIZES, pod_cluster, random_tokens
from tools.bench.pairs import Program, alternate, processor_secs
from tools.peers.turns import take_turns

PAGE = Path(__file__).resolve().parent.parent / "docs" / "predictions.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
TURNS = 5
_MOST_WORKERS, _MOST_BYTES = 4, 7e9
_WITHIN = 0.15
_WARM_UP_STEPS = 2
_POD = re.compile(r"/job:(pod_\d+)/")

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
_LONG = {"SEQUENCE_LENGTH": 1024, "GLOBAL_BATCH_SIZE": 2}
_PODS = {"NUM_PODS": 2, "PODS": "local_servers"}
_MODEL = "batch:data,heads:model,d_ff:model,vocab:model"

# {case: macros that differ from 8 sequences of 256 tokens}. The name of a case
# begins with the size and the dtype.
TIMED: dict[str, dict[str, object]] = {
  "4.8M f32": {},
  "4.8M bf16": {},
  "4.8M bf16, length 1,024": _LONG,
  "4.8M f32, 4 microbatches": {
    "GLOBAL_BATCH_SIZE": 32,
    "NUM_MICROBATCHES": 4,
  },
  "4.8M bf16, REMAT layer": {"GLOBAL_BATCH_SIZE": 16, "REMAT": "layer"},
  "26.6M f32": {},
  "26.6M bf16": {},
  "26.6M bf16, batch 2": {"GLOBAL_BATCH_SIZE": 2},
  "26.6M bf16, 2 microbatches": {
    "GLOBAL_BATCH_SIZE": 16,
    "NUM_MICROBATCHES": 2,
  },
  "26.6M f32, length 1,024": _LONG,
  "26.6M bf16, length 1,024": _LONG,
  "26.6M bf16, length 1,024, REMAT attention": {
    **_LONG,
    "REMAT": "attention",
  },
  "26.6M f32, REMAT layer": {"REMAT": "layer"},
  "113M f32, batch 4": {"GLOBAL_BATCH_SIZE": 4},
  "113M bf16, batch 4": {"GLOBAL_BATCH_SIZE": 4},
  "26.6M f32, two pods": {"GLOBAL_BATCH_SIZE": 16, **_PODS},
  "26.6M bf16, two pods": {"GLOBAL_BATCH_SIZE": 16, **_PODS},
}
LAYOUTS: dict[str, dict[str, object]] = {
  "26.6M f32, data parallel": {"MESH_SHAPE": "data:4", "LAYOUT": "batch:data"},
  "26.6M bf16, fully sharded": {
    "MESH_SHAPE": "data:4",
    "LAYOUT": "batch:data,d_model_stored:data",
  },
  "26.6M bf16, PaLM's 2D": {
    "MESH_SHAPE": "data:2,model:2",
    "LAYOUT": f"{_MODEL},d_model_stored:data,d_model_residual:model",
  },
}
CASES = {**TIMED, **LAYOUTS}


def make_config(case: str) -> PlanConfig:
  """Returns the settings of one of CASES, with this machine's rates.

  Raises:
    UserError: if this machine was not calibrated.
  """
  size, dtype = case.partition(",")[0].split()
  macros = {
    "NUM_PODS": 1,
    "GLOBAL_BATCH_SIZE": 8,
    "ACTIVATION_DTYPE": DTYPES[dtype],
    **{name.upper(): value for name, value in SIZES[size].items()},
    **CASES[case],
  }
  given = [f"{name}={value!r}" for name, value in macros.items()]
  files = ["recipes/quickstart.gin"]
  return check_settings(gin_files.load("plan", files, given).build()[1])


def predict(case: str) -> dict[str, Any]:
  """Returns the predictions for a case, for all devices of a process."""
  config = make_config(case)
  (batch_size,) = config.run.batch_sizes.sizes
  step = predict_step(config, batch_size)
  mesh, pods = config.mesh_layout, config.pods
  moved = pods.num_pods * sum(step.moved.values())
  if pods.num_pods > 1:
    moved += dcn_bytes(config.model, mesh, pods)
  of_device = sum(memory_parts(config, batch_size).values())
  return {
    "predicted_secs": step.total,
    "predicted_bytes": mesh.num_devices * of_device,
    "predicted_moved": moved,
  }


def groups(cases: Sequence[str]) -> Iterator[list[str]]:
  """Yields groups of cases whose processes fit into memory together."""
  group, size = [], 0.0
  for case in cases:
    config = make_config(case)
    needed = config.pods.num_pods * predict(case)["predicted_bytes"]
    if group and (len(group) == _MOST_WORKERS or size + needed > _MOST_BYTES):
      yield group
      group, size = [], 0.0
    group.append(case)
    size += needed
  yield group


def measure(group: Sequence[str]) -> Iterator[dict[str, Any]]:
  """Yields the record of each case of a group, whose processes take turns."""
  programs = {}
  try:
    for case in group:
      command = [sys.executable, "-m", "tools.validate_plan", "--worker", case]
      programs[case] = Program(case, command)
    yield from _take_turns(programs)
  finally:
    for program in programs.values():
      program.__exit__()


def _take_turns(programs: Mapping[str, Program]) -> Iterator[dict[str, Any]]:
  turns = alternate(list(programs.values()), TURNS)
  for case, program in programs.items():
    secs, slowdown = (
      statistics.median(turn.values[x] for turn in turns[case])
      for x in ("step_secs", "slowdown")
    )
    yield {
      "case": case,
      "measured_secs": secs if case in TIMED else None,
      "measured_bytes": turns[case][-1].values["peak_bytes"],
      "counted_moved": program.facts["moved"],
      "slowdown": slowdown,
      **predict(case),
    }


def row(record: Mapping[str, Any]) -> str:
  """Returns a row of the table, in Markdown."""
  secs, notes = record["measured_secs"], []
  cells = ["-", "-", "-", "-"]
  if secs is not None:
    cells = [f"{x:.3f} s" for x in (record["predicted_secs"], secs)]
    cells.append(
      _describe_difference(record["predicted_secs"], secs, notes, "time")
    )
    cells.append(f"{record['slowdown']:.2f}")
  sizes = record["predicted_bytes"], record["measured_bytes"]
  cells += [f"{x / 1e6:,.0f} MB" for x in sizes]
  cells.append(_describe_difference(*sizes, notes, "memory"))
  moved = record["predicted_moved"], record["counted_moved"]
  cells.append(f"{moved[1] / 1e6:,.1f} MB" if any(moved) else "-")
  if moved[0] != moved[1]:
    notes.append(f"a miss: {moved[0]:,} bytes were predicted")
  return "| " + " | ".join([record["case"], *cells, "; ".join(notes)]) + " |"


def _describe_difference(
  planned: float, measured: float, notes: list[str], what: str
) -> str:
  off = round(planned / measured - 1, 2)
  if abs(off) > _WITHIN:
    notes.append(f"a miss: {what}")
  return f"{off:+.0%}"


HEAD = (
  "| case | predicted | measured | off by | slowed | predicted | measured "
  "| off by | moved | |\n|---|---|---|---|---|---|---|---|---|---|"
)


def write(records: Sequence[Mapping[str, Any]], page: str) -> str:
  """Returns the page with the rows of these records and its other rows."""
  before, _, rest = page.partition(BEGIN)
  table, _, after = rest.partition(END)
  rows = {x.split(" | ")[0].removeprefix("| "): x for x in table.splitlines()}
  rows |= {record["case"]: row(record) for record in records}
  kept = [rows[case] for case in CASES if case in rows]
  lines = [BEGIN, HEAD, *kept, "", *summary(kept), END]
  return before + "\n".join(lines) + after


def summary(rows: Sequence[str]) -> Iterator[str]:
  """Yields one line per kind on how near plans are to measurements."""
  cells = [x.split(" | ") for x in rows]
  for what, column in (("times", 3), ("sizes of memory", 7)):
    off = [
      abs(int(x[column].rstrip("%"))) for x in cells if x[column][-1] == "%"
    ]
    if off:
      near = [
        f"{sum(x <= most for x in off)} within {most}%" for most in (5, 10)
      ]
      yield (
        f"Of {len(off)} {what}, {' and '.join(near)}; the largest difference "
        f"is {max(off)}%."
      )


def work(config: PlanConfig) -> None:
  """Trains in this process, one step per turn.

  A turn reports the seconds that the step would take on an idle machine, the
  slowdown, and the largest resident bytes of a process with devices.
  """
  keep_compiled_code()
  own_process()
  from palm_mtf._tf import tf
  from palm_mtf.programs.train_program import build_train_program
  from palm_mtf.rates.calibration import PRODUCT_FLOPS, pace, undisturbed_secs
  from palm_mtf.runtime.program import Program
  from palm_mtf.training.step import TrainStep
  from tools.traffic import traffic

  (batch_size,) = config.run.batch_sizes.sizes
  tokens = random_tokens(config.model, batch_size).astype("int32")
  batch = {"inputs": tokens, "targets": tokens}
  with (
    pod_cluster(config.pods, config.mesh_layout) as cluster,
    cluster.client() as client,
    contextlib.ExitStack() as stack,
  ):
    with client.graph.as_default():
      program = build_train_program(
        config.model,
        config.mesh_layout,
        config.optimizer,
        batch_size=batch_size,
        seed=0,
        pods=config.pods,
        devices=cluster.devices,
      )
    calls = [[program.update, *program.metrics.values()]]
    calls += [[pod.stages[0].forward for pod in program.pods]] * (
      program.num_microbatches - 1
    )
    moved = sum(
      traffic(x).total() + _count_bytes_between_pods(x) for x in calls
    )
    client.call(Program(operations=[program.initialize]))
    run, steps = TrainStep(client, program).run, itertools.count()
    for _ in range(_WARM_UP_STEPS):
      run(batch, next(steps))
    machine = stack.enter_context(pace(tf.float32))
    best_secs = PRODUCT_FLOPS / config.hardware.chip_float32_flops

    def turn() -> dict[str, float]:
      before = processor_secs(os.getpid())
      timed = machine.time_call(lambda: run(batch, next(steps)))
      _, *servers = processor_secs(os.getpid()).items()
      # On an idle machine, a server with one core would take as long as its
      # processor time, which the slowdown of products predicts less well.
      secs = max((now - before[x] for x, now in servers), default=None)
      return {
        "step_secs": secs or undisturbed_secs(*timed, best_secs),
        "slowdown": timed[1] / best_secs,
        "peak_bytes": _find_peak_bytes(),
      }

    take_turns(turn, {"moved": moved})


def _count_bytes_between_pods(fetches: list) -> int:
  """Returns the bytes that the pods' servers send to each other."""
  from tools.traffic import needed

  sent = {}
  for op in needed(fetches):
    end = _POD.findall(op.device)
    for x in op.inputs:
      begin = _POD.findall(x.op.device)
      if begin and end and begin != end:
        sent[x.name, op.device] = x.dtype.size * math.prod(x.shape.as_list())
  return sum(sent.values())


def _find_peak_bytes() -> int:
  """Returns the largest resident bytes of a server, or else of this process."""
  own, *servers = map(largest_resident_bytes, processor_secs(os.getpid()))
  return max(servers, default=own)


@one_line_errors
def main() -> None:
  """Prints the table; as a worker, trains one case."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--case", action="append", help="name of a row; else all")
  add("--json", action="store_true", help="print one object a line")
  add("--write", action="store_true", help="rows of docs/predictions.md")
  add("--worker", help=argparse.SUPPRESS)
  chosen = parser.parse_args()
  if chosen.worker:
    work(make_config(chosen.worker))
    return
  cases = chosen.case or list(CASES)
  for case in cases:
    check_choice("--case", case, CASES)
  if not chosen.json:
    print(HEAD)
  records = []
  for group in groups(cases):
    for record in measure(group):
      records.append(record)
      print(json.dumps(record) if chosen.json else row(record), flush=True)
  if chosen.write:
    page = write(records, PAGE.read_text(encoding="utf-8"))
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
  sys.exit(main())
