# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a scaling law says: loss against compute, the best size, its check."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.sweep.bootstrap import Interval, Resampled, resample
from palm_mtf.sweep.outcome import FINISHED
from palm_mtf.sweep.scaling_law import Cost, Law
from palm_mtf.sweep.table import Row

# Two runs more than the law has coefficients: residuals that tell the noise.
_MIN_RUNS, _MIN_VALUES = 7, 3
_NUM_BUDGETS = 25  # of the line in the picture


def runs_to_fit(rows: Sequence[Row]) -> list[Row]:
  """Returns the best of the finished runs of each size and number of tokens."""
  best: dict[tuple[int, int], Row] = {}
  for row in rows:
    if _has_result(row) and not row["held_out"]:
      key = row["parameters"], row["tokens"]
      if key not in best or row["loss"] < best[key]["loss"]:
        best[key] = row
  return list(best.values())


def _has_result(row: Row) -> bool:
  return row["outcome"] == FINISHED and row["loss"] is not None


def why_no_law(rows: Sequence[Row]) -> str:
  """Returns what the runs to fit lack for a scaling law, "" for nothing."""
  runs = runs_to_fit(rows)
  sizes, tokens = (
    len({row[x] for row in runs}) for x in ("parameters", "tokens")
  )
  if min(sizes, tokens) >= _MIN_VALUES and len(runs) >= _MIN_RUNS:
    return ""
  return (
    f"no scaling law: it takes {_MIN_RUNS} finished runs, of {_MIN_VALUES} "
    f"sizes and {_MIN_VALUES} numbers of tokens; there are {len(runs)}, of "
    f"{sizes} and {tokens}"
  )


def law_record(rows: Sequence[Row], budget: float | None) -> dict[str, Any]:
  """Returns the law of the runs, its optimum and its check.

  Args:
    rows: the table, for which `why_no_law` has no answer.
    budget: training FLOPs to find the best size for, or None.

  Returns:
    {name: number, or [number, low, high] with its 95% interval}; losses are in
    nats a token.
  """
  runs = runs_to_fit(rows)
  parameters, tokens, losses, flops, cost_of_token = (
    np.array([row[x] for row in runs], float)
    for x in ("parameters", "tokens", "loss", "flops", "flops_per_token")
  )
  found = resample(parameters, tokens, losses)
  cost = Cost.fitted(parameters, cost_of_token)
  most = max(flops.max(), budget or 0.0)
  return {
    "num_runs": len(runs),
    "E": found.interval(lambda law: law.e),
    "A": found.interval(lambda law: law.a),
    "alpha": found.interval(lambda law: law.alpha),
    "B": found.interval(lambda law: law.b),
    "beta": found.interval(lambda law: law.beta),
    "gamma": found.interval(lambda law: law.alpha * cost.power_of_size(law)),
    "size_power": found.interval(cost.power_of_size),
    "cost": {"scale": cost.scale, "power": cost.power},
    "budget": _optimum(found, cost, budget, flops.max()) if budget else None,
    "frontier": [
      {"flops": float(x), "loss": _frontier(found, cost, x)}
      for x in np.geomspace(flops.min(), most, _NUM_BUDGETS)
    ],
    "held_out": [
      {
        "run": row["run"],
        "predicted": found.prediction(row["parameters"], row["tokens"]),
        "measured": row["loss"],
      }
      for row in rows
      if row["held_out"] and _has_result(row)
    ],
  }


def _frontier(found: Resampled, cost: Cost, flops: float) -> Interval:
  """Returns the lowest loss for training FLOPs."""

  def lowest(law: Law) -> float:
    return float(law.loss(*cost.optimum(law, flops)))

  return found.interval(lowest)


def _optimum(
  found: Resampled, cost: Cost, budget: float, largest: float
) -> dict[str, Any]:
  return {
    "flops": budget,
    "times_the_largest_run": budget / largest,
    "parameters": found.interval(lambda law: cost.optimum(law, budget)[0]),
    "tokens": found.interval(lambda law: cost.optimum(law, budget)[1]),
    "loss": _frontier(found, cost, budget),
  }


def law_text(record: Mapping[str, Any]) -> str:
  """Returns the law, its optimum and its check for people."""
  lines = [
    f"scaling law of {record['num_runs']} runs, with 95% intervals",
    "  L(N, D) = E + A / N^alpha + B / D^beta, of N parameters and D tokens",
    "  L(C) = E + K / C^gamma with N ~ C^a, the lowest of C FLOPs",
  ]
  for name in ("E", "A", "alpha", "B", "beta", "gamma"):
    lines.append(_line(name, record[name]))
  lines.append(_line("a", record["size_power"]))
  if budget := record["budget"]:
    lines.append(
      f"compute-optimal for {budget['flops']:.3g} FLOPs, "
      f"{budget['times_the_largest_run']:.3g} times those of the largest run"
    )
    lines += [_line(x, budget[x]) for x in ("parameters", "tokens", "loss")]
  if checks := record["held_out"]:
    width = max(len(x["run"]) for x in checks)
    lines.append("runs that the law was not fitted to, predicted and measured")
    for each in checks:
      value, low, high = each["predicted"]
      lines.append(
        f"  {each['run']:{width}}  {value:.4f}  {low:.4f} to {high:.4f}  "
        f"measured {each['measured']:.4f}, {each['measured'] / value - 1:+.1%}"
      )
  return "\n".join(lines)


def _line(name: str, interval: Interval) -> str:
  value, low, high = map(_number, interval)
  return f"  {name:10}  {value:>12}  {low} to {high}"


def _number(value: float) -> str:
  """Returns three digits of a number, those of 1234567 as 1,230,000."""
  if 1e3 <= value < 1e15:
    return f"{float(f'{value:.3g}'):,.0f}"
  return f"{value:.3g}"
