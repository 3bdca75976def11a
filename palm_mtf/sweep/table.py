# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The table of a sweep: a row a run."""

import csv
import io
import math
from collections.abc import Sequence
from typing import Any

from palm_mtf.model_dir.layout import SweepDir
from palm_mtf.sweep.curve import read_curve
from palm_mtf.sweep.outcome import read_outcome
from palm_mtf.sweep.runs import SweepRun

Row = dict[str, Any]


def rows_of(runs: Sequence[SweepRun], where: SweepDir) -> list[Row]:
  """Returns a row for each run, by column.

  `flops` are model FLOPs, `secs` those of its steps, `loss` is the last
  validation loss in nats per token and `best_loss` the lowest finite one. Both
  may be None: a loss that is not finite counts as none.
  """
  rows = []
  for run in runs:
    curve = read_curve(run)
    tokens = curve.tokens[-1] if curve.losses else 0
    finite = [x if math.isfinite(x) else None for x in curve.losses]
    rows.append(
      {
        "run": run.name,
        "parameters": run.num_parameters,
        "tokens": tokens,
        "flops": tokens * run.flops_per_token,
        "flops_per_token": run.flops_per_token,
        "secs": curve.secs[-1] if curve.losses else 0.0,
        "loss": finite[-1] if finite else None,
        "best_loss": min((x for x in finite if x is not None), default=None),
        "outcome": read_outcome(where, run.name) or "not finished",
        "held_out": run.is_held_out,
      }
    )
  return rows


def table_text(rows: Sequence[Row]) -> str:
  """Returns the table for people."""
  width = max(len("run"), *(len(row["run"]) for row in rows))
  lines = [
    f"{'run':{width}}  {'parameters':>14}  {'tokens':>15}  {'FLOPs':>9}  "
    f"{'secs':>9}  {'loss':>7}  {'best':>7}"
  ]
  for row in rows:
    losses = (row["loss"], row["best_loss"])
    loss, best = ("-" if x is None else f"{x:.4f}" for x in losses)
    notes = [] if row["outcome"] == "finished" else [row["outcome"]]
    notes += ["held out"] * row["held_out"]
    lines.append(
      f"{row['run']:{width}}  {row['parameters']:14,}  {row['tokens']:15,}  "
      f"{row['flops']:9.3g}  {row['secs']:9,.1f}  {loss:>7}  {best:>7}  "
      f"{', '.join(notes)}".rstrip()
    )
  return "\n".join(lines)


def table_csv(rows: Sequence[Row]) -> bytes:
  """Returns the table as a CSV file."""
  file = io.StringIO()
  writer = csv.DictWriter(file, fieldnames=list(rows[0]))
  writer.writeheader()
  writer.writerows(rows)
  return file.getvalue().encode()
