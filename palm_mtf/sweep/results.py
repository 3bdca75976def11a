# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The results of a sweep: the losses of each run, how it ended, and a table."""

import csv
import dataclasses
import io
import math
from collections.abc import Iterable, Sequence
from typing import Any

from palm_mtf.config import SweepConfig
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.json_lines import read_json_lines
from palm_mtf.model_dir.layout import ModelDir, SweepDir
from palm_mtf.sweep.runs import SweepRun

FINISHED, STOPPED_EARLY = "finished", "stopped early"

Row = dict[str, Any]


def read_outcome(where: SweepDir, name: str) -> str | None:
  """Returns how a run ended, None for a run that has to continue."""
  try:
    with open(where.outcome(name), encoding="utf-8", errors="replace") as file:
      outcome = file.read().strip()
  except FileNotFoundError:
    return None
  return outcome if outcome in (FINISHED, STOPPED_EARLY) else None


def write_outcome(where: SweepDir, name: str, outcome: str) -> None:
  """Keeps how a run ended, so that it is not repeated."""
  write_atomically(where.outcome(name), f"{outcome}\n".encode())


@dataclasses.dataclass(kw_only=True)
class Curve:
  """Validation loss of a run against training; each list is by evaluation.

  Attributes:
    losses: validation losses, nats per token; NaN for one that is not finite.
    tokens: training tokens before each evaluation.
    flops: model FLOPs of these tokens.
    secs: seconds of the steps before each evaluation, without evaluations,
      checkpoints and starts.
  """

  losses: list[float] = dataclasses.field(default_factory=list)
  tokens: list[int] = dataclasses.field(default_factory=list)
  flops: list[float] = dataclasses.field(default_factory=list)
  secs: list[float] = dataclasses.field(default_factory=list)


def read_curve(run: SweepRun) -> Curve:
  """Reads metrics.jsonl of a run; the curve is empty before its first line."""
  curve, secs, last_step = Curve(), 0.0, 0
  for line in read_json_lines(ModelDir(run.model_dir).metrics, number="step"):
    # The line has the mean over the steps since the line before it.
    secs += line.get("step_secs", 0.0) * (line["step"] - last_step)
    last_step = line["step"]
    if "validation_loss" in line:
      loss = line["validation_loss"]  # null where it is not finite
      curve.losses.append(math.nan if loss is None else loss)
      curve.tokens.append(line["tokens"])
      curve.flops.append(line["tokens"] * run.flops_per_token)
      curve.secs.append(secs)
  return curve


def should_stop(losses: Iterable[float], sweep: SweepConfig) -> bool:
  """Returns whether a run has had its last improvement SWEEP_PATIENCE ago.

  The rule is that of Prechelt (1998, "Early stopping - but when?") with
  patience, as deep learning libraries have it.

  Args:
    losses: validation losses of the run by step, nats per token.
    sweep: SWEEP_PATIENCE, in evaluations, and SWEEP_MIN_DELTA.
  """
  best, num_worse = math.inf, 0
  for loss in losses:
    num_worse += 1
    if loss < best - sweep.sweep_min_delta:
      best, num_worse = loss, 0
  return sweep.sweep_patience is not None and num_worse >= sweep.sweep_patience


def tabulate(runs: Sequence[SweepRun], where: SweepDir) -> list[Row]:
  """Returns a row for each run, by column.

  `flops` are model FLOPs, `secs` the seconds of its steps, `loss` is the last
  validation loss in nats per token and `best_loss` the lowest finite one. A
  loss that is not finite is None.
  """
  rows = []
  for run in runs:
    curve = read_curve(run)
    losses = [x if math.isfinite(x) else None for x in curve.losses]
    tokens, secs, loss = 0, 0.0, None
    if losses:
      tokens, secs, loss = curve.tokens[-1], curve.secs[-1], losses[-1]
    rows.append(
      {
        "run": run.name,
        "parameters": run.num_parameters,
        "tokens": tokens,
        "flops": tokens * run.flops_per_token,
        "flops_per_token": run.flops_per_token,
        "secs": secs,
        "loss": loss,
        "best_loss": min((x for x in losses if x is not None), default=None),
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
    notes = [] if row["outcome"] == FINISHED else [row["outcome"]]
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
