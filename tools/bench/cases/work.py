# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how the cost of training grows with its work.

  python -m tools.bench work
  python -m tools.bench work --picture docs/work.png

batch       tokens per second with more sequences per step, relative to 8
layers      seconds per step with more layers, relative to 6
data        share of a step that waits for its batch
checkpoint  pause of training for a checkpoint, in steps
"""

# `batch` and `layers` use the model of 26.6M parameters, in sequences of 256.
# The programs of all batch sizes stay up and take turns, one step each, and so
# do the programs of all numbers of layers (pairs.py). `data` and `checkpoint`
# come from runs of `palm_mtf train` on the quickstart's text, with models of
# three sizes: a line of metrics.jsonl has the waits of a step.

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.report.plans import write_png
from tools.bench.cases.train import train
from tools.bench.command import Flag, worker_command
from tools.bench.models import SIZES, benchmark_config, fast_dtype_here
from tools.bench.pairs import Ratio, race, ratio

BATCH_SIZE, NUM_LAYERS = 8, 6  # bases of the ratios
BATCH_SIZES = (2, 4, BATCH_SIZE, 16, 32)
LAYERS = (1, 3, NUM_LAYERS, 9, 12)
TRAINED = ("4.8M", "26.6M", "113M")
STEPS, CHECKPOINT_STEPS = 40, 10
_WARM_UP_STEPS = 2  # in a run; the first compiles


def _check_picture(name: str, path: str) -> str:
  if not path.endswith(".png"):
    raise UserError(f"{name} = {path!r}: give a file, *.png.")
  return path


FLAGS = {
  "--rounds": Flag(31, "turns of each program"),
  "--picture": Flag(None, "file to draw into, *.png", _check_picture),
}


def work(batch_size: int = BATCH_SIZE, num_layers: int = NUM_LAYERS) -> None:
  """Takes turns: one training step each."""
  config = benchmark_config(fast_dtype_here())
  train(dataclasses.replace(config, num_layers=num_layers), batch_size)


def measure_ratios(
  setting: str, values: Sequence[int], base: int, rounds: int
) -> dict[int, Ratio]:
  """Returns the ratios of step times to the time of the step with `base`.

  Args:
    setting: "batch_size" or "num_layers".
    values: values of the setting; one of them is `base`.
    base: value with which the other values are compared.
    rounds: number of steps for each value.
  """
  turns = race(
    {str(x): worker_command("work", **{setting: x}) for x in values},
    rounds,
    tolerance=math.inf,
  )
  return {x: ratio(turns[str(x)], turns[str(base)]) for x in values}


def measure_waits(size: str, folder: str) -> dict[str, float]:
  """Trains a model of SIZES; returns its waits as shares of a median step."""
  macros = {
    **{name.upper(): value for name, value in SIZES[size].items()},
    "MODEL_DIR": repr(folder),
    "GLOBAL_BATCH_SIZE": BATCH_SIZE,
    "TRAIN_STEPS": STEPS,
    "CHECKPOINT_STEPS": CHECKPOINT_STEPS,
    "EVAL_STEPS": STEPS,
    "EVAL_BATCHES": 1,
    "LOG_STEPS": 1,
    "PROMPTS": [],
  }
  subprocess.run(
    [
      *(sys.executable, "-m", "palm_mtf", "train"),
      "--gin_file=recipes/quickstart.gin",
      *(f"--gin.{name}={value}" for name, value in macros.items()),
    ],
    check=True,
    stdout=sys.stderr,
  )
  with open(os.path.join(folder, "metrics.jsonl")) as file:
    lines = [json.loads(line) for line in file]
  return compute_shares(lines)


def compute_shares(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns the waits in the metrics of each step, in median steps.

  Example:
    If each step takes 2 s and waits 0.001 s for its batch, and one checkpoint
    takes 0.5 s: {"step_secs": 2, "data": 0.0005, "checkpoint": 0.25}.
  """
  lines = [x for x in lines if "step_secs" in x and x["step"] > _WARM_UP_STEPS]
  step = statistics.median(x["step_secs"] for x in lines)
  pauses = [x["checkpoint_wait_secs"] for x in lines]
  return {
    "step_secs": step,
    "data": statistics.mean(x["data_wait_secs"] for x in lines) / step,
    "checkpoint": max(pauses) / step,  # the longest
  }


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per point."""
  found = measure_ratios("batch_size", BATCH_SIZES, BATCH_SIZE, chosen.rounds)
  for value, seconds in found.items():
    # Tokens per second: a longer step means fewer.
    speed = {
      "value": value / BATCH_SIZE / seconds.median,
      "low": value / BATCH_SIZE / seconds.high,
      "high": value / BATCH_SIZE / seconds.low,
    }
    yield {"of": "batch", "x": value, **speed, **_rounds(seconds)}
  found = measure_ratios("num_layers", LAYERS, NUM_LAYERS, chosen.rounds)
  for value, seconds in found.items():
    span = {"low": seconds.low, "high": seconds.high}
    record = {"of": "layers", "x": value, "value": seconds.median, **span}
    yield record | _rounds(seconds)
  for size in TRAINED:
    with tempfile.TemporaryDirectory() as folder:
      shares = measure_waits(size, folder)
    for of in ("data", "checkpoint"):
      yield {"of": of, "x": size, "value": shares[of]}


def _rounds(found: Ratio) -> dict[str, object]:
  return {"rounds": found.rounds, "is_disturbed": found.is_disturbed}


def row(record: Mapping[str, object]) -> str:
  """Returns a line of the table."""
  text = f"{record['of']:<10}  {record['x']:>5}  {record['value']:10.6f}"
  if "low" in record:
    text += f"  {record['low']:.3f} to {record['high']:.3f}"
    text += f", {record['rounds']} rounds"
    text += ", disturbed" if record["is_disturbed"] else ""
  return text


def fit_line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """Returns slope and value at 0 of the least-squares line through points."""
  slope, height = np.polyfit(*zip(*points, strict=True), 1)
  return float(slope), float(height)


def draw(records: Sequence[Mapping[str, object]], path: str) -> None:
  """Draws a panel per kind of cost."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9.2, 6.4), layout="constrained")
  panels = figure.subplots(2, 2)
  of = {
    kind: [x for x in records if x["of"] == kind]
    for kind in ("batch", "layers", "data", "checkpoint")
  }
  for axes, kind in zip(panels[0], ("batch", "layers"), strict=True):
    own = of[kind]
    x, y = ([each[key] for each in own] for key in ("x", "value"))
    errors = [
      [each["value"] - each["low"] for each in own],
      [each["high"] - each["value"] for each in own],
    ]
    axes.errorbar(x, y, errors, fmt="o", capsize=3)
    axes.set_ylim(bottom=0)
  batch, layers = panels[0]
  batch.axhline(1, color="0.6", linewidth=1)
  batch.set(
    title="tokens per second", xlabel="sequences per step", xscale="log"
  )
  batch.set_xticks(BATCH_SIZES, [str(x) for x in BATCH_SIZES])
  batch.minorticks_off()
  batch.set_ylabel(f"relative to {BATCH_SIZE} sequences")
  slope, height = fit_line([(x["x"], x["value"]) for x in of["layers"]])
  ends = [0, max(LAYERS)]
  layers.plot(ends, [height + slope * x for x in ends], "0.6", linewidth=1)
  layers.set(title="seconds per step", xlabel="layers")
  layers.set_ylabel(f"relative to {NUM_LAYERS} layers")
  limits = {
    "data": ("wait for a batch", "% of a step", 100, 0.1),
    "checkpoint": ("pause for a checkpoint", "steps", 1, 0.5),
  }
  for axes, (kind, (title, unit, factor, most)) in zip(
    panels[1], limits.items(), strict=True
  ):
    values = [factor * each["value"] for each in of[kind]]
    axes.bar([each["x"] for each in of[kind]], values, width=0.5)
    axes.axhline(most, color="0.6", linestyle=":")
    axes.set(title=title, ylabel=unit, xlabel="parameters")
  for axes in panels.flat:
    axes.spines[["top", "right"]].set_visible(False)
  write_png(figure, path, dpi=120)


def finish(records: Sequence[Mapping]) -> str:
  """Returns how far layers are from a line."""
  points = [(x["x"], x["value"]) for x in records if x["of"] == "layers"]
  slope, height = fit_line(points)
  off = max(abs(y / (height + slope * x) - 1) for x, y in points)
  return f"layers: at most {off:.1%} off {height:.3f} + {slope:.4f} layers"
