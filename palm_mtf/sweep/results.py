# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep: which runs have finished, and the table of runs."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.paths import ModelDir, SweepDir
from palm_mtf.sweep.runs import SweepRun

FINISHED = "finished"

Row = dict[str, Any]


def has_finished(where: SweepDir, name: str) -> bool:
  """Returns whether a run has ended without an error."""
  try:
    with open(where.outcome(name), encoding="utf-8", errors="replace") as file:
      return file.read().strip() == FINISHED
  except FileNotFoundError:
    return False


def mark_finished(where: SweepDir, name: str) -> None:
  """Records in a file that a run has finished, so that no sweep repeats it."""
  write_atomically(where.outcome(name), f"{FINISHED}\n".encode())


def tabulate(runs: Sequence[SweepRun], where: SweepDir) -> list[Row]:
  """Returns a row {column: value} for each run.

  `flops` are model FLOPs. `secs` is the time of all training steps up to the
  last evaluation. `loss` is the last validation loss, nats per token, and
  `best_loss` the lowest finite one. A loss that is not finite is None.
  """
  rows = []
  for run in runs:
    losses, tokens, secs, now, last_step = [], 0, 0.0, 0.0, 0
    for line in read_json_lines(ModelDir(run.model_dir).metrics, number="step"):
      # step_secs is a mean over the steps since the previous line.
      now += line.get("step_secs", 0.0) * (line["step"] - last_step)
      last_step = line["step"]
      if "validation_loss" in line:
        # A loss that is not finite is null; earlier versions wrote NaN.
        loss = line["validation_loss"]
        is_finite = loss is not None and math.isfinite(loss)
        losses.append(loss if is_finite else None)
        tokens, secs = line["tokens"], now
    is_finished = has_finished(where, run.name)
    rows.append(
      {
        "run": run.name,
        "parameters": run.num_parameters,
        "tokens": tokens,
        "flops": tokens * run.flops_per_token,
        "flops_per_token": run.flops_per_token,
        "secs": secs,
        "loss": losses[-1] if losses else None,
        "best_loss": min((x for x in losses if x is not None), default=None),
        "outcome": FINISHED if is_finished else "not finished",
        "held_out": run.is_held_out,
      }
    )
  return rows


def table_text(rows: Sequence[Row]) -> str:
  """Returns the rows of `tabulate` as a text table."""
  width = max(len("run"), *(len(row["run"]) for row in rows))
  lines = [
    f"{'run':{width}}  {'parameters':>14}  {'tokens':>15}  {'FLOPs':>9}  "
    f"{'secs':>9}  {'loss':>7}  {'best':>7}"
  ]
  for row in rows:
    losses = (row["loss"], row["best_loss"])
    loss, best = ("-" if x is None else f"{x:.4f}" for x in losses)
    notes = [] if row["outcome"] == FINISHED else [row["outcome"]]
    notes += ["held out"] * row["held_out"]
    lines.append(
      f"{row['run']:{width}}  {row['parameters']:14,}  {row['tokens']:15,}  "
      f"{row['flops']:9.3g}  {row['secs']:9,.1f}  {loss:>7}  {best:>7}  "
      f"{', '.join(notes)}".rstrip()
    )
  return "\n".join(lines)


def table_csv(rows: Sequence[Row]) -> bytes:
  """Returns the rows of `tabulate` as a CSV file."""
  file = io.StringIO()
  writer = csv.DictWriter(file, fieldnames=list(rows[0]))
  writer.writeheader()
  writer.writerows(rows)
  return file.getvalue().encode()
