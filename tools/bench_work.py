# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures what training costs as its work grows.

  python tools/bench_work.py
  python tools/bench_work.py --picture docs/work.png

batch       tokens a second with more sequences in a step, to those of 8
layers      seconds of a step with more layers, to those of 6
data        share of a step that waits for its batch
checkpoint  pause of training for a checkpoint, in steps

Results are on stdout, progress is on stderr.
"""

# The model of the first two is that of 26.6M parameters in bench_peers.py, in
# sequences of 256. Programs of all batch sizes stay up and take turns, a step
# each, and so do those of all numbers of layers (bench_pairs.py). The other two
# are read off runs of `palm_mtf train` on the quickstart's text, of models of
# three sizes: a line of metrics.jsonl has the waits of a step.

import argparse
import contextlib
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from bench_command import one_line_errors
from bench_pairs import Program, Ratio, alternate, ratio
from bench_peers import SIZES, benchmark_config
from bench_train import run_ours

from palm_mtf.errors import UserError, check_count
from palm_mtf.machine.activation_dtype import fast_dtype_here

BATCH_SIZE, NUM_LAYERS = 8, 6  # what the others are compared with
BATCH_SIZES = (2, 4, BATCH_SIZE, 16, 32)
LAYERS = (1, 3, NUM_LAYERS, 9, 12)
TRAINED = ("4.8M", "26.6M", "113M")
STEPS, CHECKPOINT_STEPS = 40, 10
_WARM_UP_STEPS = 2  # of a run: the first compiles


def ratios(
  setting: str, values: Sequence[int], rounds: int
) -> dict[int, Ratio]:
  """Returns the seconds of a step to those of the model as it is.

  Args:
    setting: --batch_size or --num_layers.
    values: values of the setting.
    rounds: number of steps of each value.
  """
  worker = [sys.executable, __file__, "--worker"]
  with contextlib.ExitStack() as stack:
    programs = [
      stack.enter_context(Program(str(x), [*worker, f"{setting}={x}"]))
      for x in values
    ]
    turns = alternate(programs, rounds)
  base = BATCH_SIZE if setting == "--batch_size" else NUM_LAYERS
  return {x: ratio(turns[str(x)], turns[str(base)]) for x in values}


def waits(size: str, folder: str) -> dict[str, float]:
  """Trains a model of SIZES; returns shares of its step, the median one."""
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
  return shares_of_a_step(lines)


def shares_of_a_step(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
  """Returns what metrics of each step say of waits, in median steps.

  Example:
    Steps of 2 s, 0.001 s for the batch of each and 0.5 s for one checkpoint:
    {"step_secs": 2, "data": 0.0005, "checkpoint": 0.25}.
  """
  lines = [x for x in lines if "step_secs" in x and x["step"] > _WARM_UP_STEPS]
  step = statistics.median(x["step_secs"] for x in lines)
  pauses = [x["checkpoint_wait_secs"] for x in lines]
  return {
    "step_secs": step,
    "data": statistics.mean(x["data_wait_secs"] for x in lines) / step,
    "checkpoint": max(pauses) / step,  # the longest
  }


def measure(rounds: int) -> Iterator[dict[str, object]]:
  """Yields a record of each point."""
  for value, found in ratios("--batch_size", BATCH_SIZES, rounds).items():
    # Tokens a second: what is longer is less.
    speed = {
      "value": value / BATCH_SIZE / found.median,
      "low": value / BATCH_SIZE / found.high,
      "high": value / BATCH_SIZE / found.low,
    }
    yield {"of": "batch", "x": value, **speed, **_rounds(found)}
  for value, found in ratios("--num_layers", LAYERS, rounds).items():
    secs = {"value": found.median, "low": found.low, "high": found.high}
    yield {"of": "layers", "x": value, **secs, **_rounds(found)}
  for size in TRAINED:
    with tempfile.TemporaryDirectory() as folder:
      found = waits(size, folder)
    for of in ("data", "checkpoint"):
      yield {"of": of, "x": size, "value": found[of]}


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


def line_of(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
  """Returns slope and height at 0 of the line through points, least squares."""
  slope, height = np.polyfit(*zip(*points, strict=True), 1)
  return float(slope), float(height)


def draw(records: Sequence[Mapping[str, object]], path: str) -> None:
  """Draws a panel of each kind."""
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
  batch.set(title="tokens a second", xlabel="sequences of a step", xscale="log")
  batch.set_xticks(BATCH_SIZES, [str(x) for x in BATCH_SIZES])
  batch.minorticks_off()
  batch.set_ylabel(f"to those of {BATCH_SIZE} sequences")
  slope, height = line_of([(x["x"], x["value"]) for x in of["layers"]])
  ends = [0, max(LAYERS)]
  layers.plot(ends, [height + slope * x for x in ends], "0.6", linewidth=1)
  layers.set(title="seconds of a step", xlabel="layers")
  layers.set_ylabel(f"to those of {NUM_LAYERS} layers")
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
  # A reader of the page never sees half a picture.
  partial = Path(path).with_suffix(".partial.png")
  figure.savefig(partial, dpi=120)
  os.replace(partial, path)


@one_line_errors
def main() -> None:
  """Measures, or takes turns as a program of a comparison."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--rounds", type=int, default=31, help="turns of each program")
  add("--picture", help="file to draw into, *.png")
  add("--json", action="store_true", help="print one object a line")
  add("--worker", action="store_true", help=argparse.SUPPRESS)
  add("--batch_size", type=int, default=BATCH_SIZE, help=argparse.SUPPRESS)
  add("--num_layers", type=int, default=NUM_LAYERS, help=argparse.SUPPRESS)
  chosen = parser.parse_args()
  check_count("--rounds", chosen.rounds)
  if chosen.picture and not chosen.picture.endswith(".png"):
    raise UserError(f"--picture = {chosen.picture!r}: give a file, *.png.")
  if chosen.worker:
    config = benchmark_config(fast_dtype_here())
    config = dataclasses.replace(config, num_layers=chosen.num_layers)
    run_ours(config, chosen.batch_size)
    return
  records = []
  for record in measure(chosen.rounds):
    records.append(record)
    print(json.dumps(record) if chosen.json else row(record), flush=True)
  slope, height = line_of(
    [(x["x"], x["value"]) for x in records if x["of"] == "layers"]
  )
  off = max(
    abs(x["value"] / (height + slope * x["x"]) - 1)
    for x in records
    if x["of"] == "layers"
  )
  if not chosen.json:
    print(f"layers: at most {off:.1%} off {height:.3f} + {slope:.4f} layers")
  if chosen.picture:
    draw(records, chosen.picture)


if __name__ == "__main__":
  sys.exit(main())
