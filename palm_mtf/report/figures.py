# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of the report: metrics of all runs against tokens or steps."""

import base64
import importlib.util
import io
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.report.runs import Run, is_number


class Panel(NamedTuple):
  """Panel: one figure of the page."""

  title: str  # quantity, and its unit where tick labels have none
  fields: tuple[str, ...]  # of metrics.jsonl, in the order of _LINE_STYLES
  unit: str = ""  # of tick labels, which then begin at 0; "%" of shares of 1


_PANELS = (
  Panel("Loss (nats/token)", ("loss", "validation_loss", "unigram_entropy")),
  Panel("Learning rate", ("learning_rate",)),
  Panel("Gradient norm before clipping", ("grad_norm",)),
  Panel("z-loss (nats/token)", ("z_loss",)),
  Panel("Speed (tokens/s)", ("tokens_per_sec",), "/s"),
  Panel("MFU (% of the chips' peak)", ("mfu",), "%"),
  Panel("Step time", ("step_secs",), "s"),
  Panel("Data wait per step", ("data_wait_secs",), "s"),
  Panel("Checkpoint wait per line", ("checkpoint_wait_secs",), "s"),
  Panel("Memory of the process", ("host_memory_bytes",), "B"),
)
# By position in Panel.fields: text in the legend, and Matplotlib's style.
_LINE_STYLES = (
  ("training", {"linewidth": 1.2}),
  ("validation", {"linewidth": 1.2, "marker": "o", "markersize": 4}),
  ("unigram entropy", {"linewidth": 1.2, "linestyle": (0, (1, 2))}),
)
# Color and dashes of each run, valid in CSS and in Matplotlib: Okabe and Ito's
# palette, which color-blind readers can tell apart.
RUN_LINES = [
  (color, dashes)
  for dashes in ("solid", "dashed", "dotted")
  for color in ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
]
_NUM_MEANS = 200  # of a line that has more than twice as many points
_LOG_RATIO = 15  # largest to smallest number, from which on y is logarithmic


def check_can_draw() -> None:
  """Raises UserError unless Matplotlib is installed."""
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError(
      "pictures are drawn with Matplotlib, which is not installed: "
      f"{sys.executable} -m pip install 'matplotlib>=3.10,<4'"
    )


def panels(runs: Sequence[Run]) -> list[Panel]:
  """Returns the panels that have numbers, the well-known ones first."""
  fields = dict.fromkeys(x for run in runs for line in run.lines for x in line)
  values = {x: {y for run in runs for y in run.values(x)} for x in fields}
  found = [p for p in _PANELS if any(values.get(x) for x in p.fields)]
  known = {"step", "tokens", *(x for panel in _PANELS for x in panel.fields)}
  for field, numbers in values.items():
    # Traces show what traced steps measured, and a constant is no curve.
    if field not in known and field[:7] != "traced_" and len(numbers) > 1:
      quantity, _, _ = field.partition("/")  # such as host_memory_bytes/pod_0
      unit = {"secs": "s", "bytes": "B"}.get(quantity.rpartition("_")[2], "")
      found.append(Panel(field, (field,), unit))
  return found


def image(runs: Sequence[Run], panel: Panel) -> str:
  """Returns a panel as a PNG image in a data: URL, which needs no file."""
  file = io.BytesIO()
  # Transparent: the page's own background, light or dark, shows through.
  draw(runs, panel).savefig(file, format="png", dpi=160, transparent=True)
  return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def draw(runs: Sequence[Run], panel: Panel) -> Any:
  """Draws a Matplotlib figure: the lines of all runs, and their rewinds."""
  from matplotlib.figure import Figure

  is_wide = len(panel.fields) > 1
  figure = Figure(figsize=(11, 4) if is_wide else (5, 3), layout="constrained")
  axes = figure.add_subplot()
  # Runs of different batch sizes compare by tokens, if all lines have them.
  tokens = [line.get("tokens") for run in runs for line in run.lines]
  x_field = "tokens" if all(map(is_number, tokens)) else "step"
  for i, run in enumerate(runs):
    color, dashes = RUN_LINES[i % len(RUN_LINES)]
    for field, (_, style) in zip(panel.fields, _LINE_STYLES, strict=False):
      points = run.points(field, x_field)
      if field == "unigram_entropy" and points:
        points.insert(0, (0, points[0][1]))  # a level, not a curve
      _draw_points(axes, points, {"color": color, "linestyle": dashes} | style)
    for rewind in run.rewinds:
      x = _x_of_step(run, rewind["step"], x_field)
      back_to = _x_of_step(run, rewind["to_step"], x_field)
      axes.axvline(x, color=color, linewidth=0.8, linestyle="dotted")
      # Shaded: the steps that were undone.
      axes.axvspan(back_to, x, color=color, alpha=0.1, linewidth=0)
  if is_wide:
    # Gray lines in the legend stand for the lines of all runs.
    for label, style in _LINE_STYLES:
      axes.plot([], [], color="0.4", label=label, **style)
    axes.legend(frameon=False)
  _set_axes(axes, panel, x_field)
  return figure


def _draw_points(
  axes: Any, points: Sequence[tuple[float, float]], style: dict[str, Any]
) -> None:
  if len(points) == 1:
    style = {"marker": "o", "markersize": 4, **style}
  elif len(points) > 2 * _NUM_MEANS:
    # Faint: every point, so that a spike shows. Solid: means of neighbors.
    axes.plot(*zip(*points, strict=True), **{**style, "alpha": 0.25})
    bins = np.array_split(np.array(points), _NUM_MEANS)
    points = [each.mean(axis=0) for each in bins]
  if points:
    axes.plot(*zip(*points, strict=True), **style)


def _x_of_step(run: Run, step: float, x_field: str) -> float:
  # A step between two lines is interpolated.
  steps, xs = zip((0, 0), *run.points(x_field, "step"), strict=True)
  if step > steps[-1] > 0:
    # The lines since a rewind's target go when the run resumes there.
    return xs[-1] * step / steps[-1]
  return float(np.interp(step, steps, xs))


def _set_axes(axes: Any, panel: Panel, x_field: str) -> None:
  from matplotlib import ticker

  axes.spines[:].set_visible(False)
  axes.grid(axis="y", alpha=0.3)
  axes.set_xlabel("tokens" if x_field == "tokens" else "steps")
  axes.set_xlim(left=0)
  # 2500000 tokens are 2.5M, and 780e9 are 780B, which engineers write G.
  short = ticker.EngFormatter(sep="")
  axes.xaxis.set_major_formatter(lambda x, _: short(x).replace("G", "B"))
  low, high = axes.dataLim.intervaly
  if panel.unit:
    formatters = {"%": ticker.PercentFormatter(1.0)}
    engineering = ticker.EngFormatter(panel.unit)
    axes.yaxis.set_major_formatter(formatters.get(panel.unit, engineering))
    axes.set_ylim(0, 1.1 * high or 1)
  elif 0 < low * _LOG_RATIO < high:
    axes.set_yscale("log", subs=(2, 5))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
