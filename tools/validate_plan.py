# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Compares plans of this machine with what training on it takes.

  palm_mtf plan --calibrate
  python -m tools.validate_plan
  python -m tools.validate_plan --case "26.6M bf16" --json
  python -m tools.validate_plan --write      into docs/predictions.md

The machine should do nothing else. Results are on stdout, progress on stderr.
"""

# None of these models is one that the calibration trains. Each trains in a
# process of its own, pods in processes of a core each; a few live at once and
# take turns, a step a turn. The rule was fixed before the first table: seconds
# of a step are divided by how much longer products right before and after it
# take than at best when calibrated (rates/calibration.py); the median of TURNS
# counts.
# Of pods in processes of a core each it is the processor time of the busier.
# How much slower the machine was, in the median, has a column; of several runs
# a row keeps the one where that was least. Layouts split virtual devices, which
# share cores: their time says nothing, their memory and bytes do.

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from palm_mtf.accounting.communication import dcn_bytes
from palm_mtf.accounting.plan import memory_parts
from palm_mtf.accounting.step_time import predicted
from palm_mtf.cli import gin_files
from palm_mtf.commands.plan import check_settings
from palm_mtf.config import PlanConfig
from palm_mtf.errors import check_choice
from tools.bench.command import one_line_errors
from tools.bench.models import SIZES
from tools.bench.pairs import Program, alternate
from tools.plan_worker import work

PAGE = Path(__file__).resolve().parent.parent / "docs" / "predictions.md"
BEGIN, END = "<!-- measured -->", "<!-- end of measured -->"
TURNS = 5
_MOST_WORKERS, _MOST_BYTES = 4, 7e9
_WITHIN = 0.15

DTYPES = {"f32": "float32", "bf16": "bfloat16"}
_LONG = {"SEQUENCE_LENGTH": 1024, "GLOBAL_BATCH_SIZE": 2}
_PODS = {"NUM_PODS": 2, "PODS": "local_servers"}
_MODEL = "batch:data,heads:model,d_ff:model,vocab:model"

# What differs from 8 sequences of 256, by the name of the case: size, dtype.
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


def config_of(case: str) -> PlanConfig:
  """Returns the settings of one of CASES, with this machine's rates.

  Raises:
    UserError: this machine was not calibrated.
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


def prediction(case: str) -> dict[str, Any]:
  """Returns what is predicted of a case, for all devices of a process."""
  config = config_of(case)
  (batch_size,) = config.run.batch_sizes.sizes
  step = predicted(config, batch_size)
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
  """Yields cases that live at once, as memory allows."""
  group, size = [], 0.0
  for case in cases:
    config = config_of(case)
    needed = config.pods.num_pods * prediction(case)["predicted_bytes"]
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
    yield from _records(programs)
  finally:
    for program in programs.values():
      program.__exit__()


def _records(programs: Mapping[str, Program]) -> Iterator[dict[str, Any]]:
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
      **prediction(case),
    }


def row(record: Mapping[str, Any]) -> str:
  """Returns a row of the table, in Markdown."""
  secs, notes = record["measured_secs"], []
  cells = ["-", "-", "-", "-"]
  if secs is not None:
    cells = [f"{x:.3f} s" for x in (record["predicted_secs"], secs)]
    cells.append(_off(record["predicted_secs"], secs, notes, "time"))
    cells.append(f"{record['slowdown']:.2f}")
  sizes = record["predicted_bytes"], record["measured_bytes"]
  cells += [f"{x / 1e6:,.0f} MB" for x in sizes]
  cells.append(_off(*sizes, notes, "memory"))
  moved = record["predicted_moved"], record["counted_moved"]
  cells.append(f"{moved[1] / 1e6:,.1f} MB" if any(moved) else "-")
  if moved[0] != moved[1]:
    notes.append(f"a miss: {moved[0]:,} bytes were predicted")
  return "| " + " | ".join([record["case"], *cells, "; ".join(notes)]) + " |"


def _off(planned: float, measured: float, notes: list[str], what: str) -> str:
  off = round(planned / measured - 1, 2)
  if abs(off) > _WITHIN:
    notes.append(f"a miss: {what}")
  return f"{off:+.0%}"


HEAD = (
  "| case | predicted | measured | off by | slowed | predicted | measured "
  "| off by | moved | |\n|---|---|---|---|---|---|---|---|---|---|"
)


def write(records: Sequence[Mapping[str, Any]], page: str) -> str:
  """Returns the page with the rows of these records, others as they are."""
  before, _, rest = page.partition(BEGIN)
  table, _, after = rest.partition(END)
  rows = {x.split(" | ")[0].removeprefix("| "): x for x in table.splitlines()}
  rows |= {record["case"]: row(record) for record in records}
  kept = [rows[case] for case in CASES if case in rows]
  lines = [BEGIN, HEAD, *kept, "", *summary(kept), END]
  return before + "\n".join(lines) + after


def summary(rows: Sequence[str]) -> Iterator[str]:
  """Yields how near the plans of a table's rows are, a line for each kind."""
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


@one_line_errors
def main() -> None:
  """Prints the table, or in a process of its own trains."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--case", action="append", help="name of a row; else all")
  add("--json", action="store_true", help="print one object a line")
  add("--write", action="store_true", help="rows of docs/predictions.md")
  add("--worker", help=argparse.SUPPRESS)
  chosen = parser.parse_args()
  if chosen.worker:
    work(config_of(chosen.worker))
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
