# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures of the report: plots the metrics of all runs."""

import base64
import importlib.util
import io
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_mtf.errors import UserError
from palm_mtf.report.runs import Run, is_number


class Panel(NamedTuple):
  """One figure on the report's page."""

  title: str  # quantity, and its unit unless tick labels show the unit
  fields: tuple[str, ...]  # of metrics.jsonl, in the order of _LINE_STYLES
  unit: str = ""  # on tick labels ("%" for fractions); if set, y begins at 0


_PANELS = (
  Panel("Loss (nats/token)", ("loss", "validation_loss", "unigram_entropy")),
  Panel("Learning rate", ("learning_rate",)),
  Panel("Gradient norm before clipping", ("grad_norm",)),
  Panel("z-loss (nats/token)", ("z_loss",)),
  Panel("Speed (tokens/s)", ("tokens_per_sec",), "/s"),
  Panel("MFU (% of the chips' peak)", ("mfu",), "%"),
  Panel("HFU (% of the chips' peak)", ("hfu",), "%"),
  Panel("Step time", ("step_secs",), "s"),
  Panel("Data wait per step", ("data_wait_secs",), "s"),
  Panel("Checkpoint wait per line", ("checkpoint_wait_secs",), "s"),
  Panel("Memory of the process", ("host_memory_bytes",), "B"),
)
# {quantity in a field, as in "update_rms/mlp": start of the figure's title}
_QUANTITIES = {
  "parameter_rms": "RMS of parameters:",
  "update_rms": "RMS of updates:",
  "host_memory_bytes": "Memory of",
}
# (text in the legend, Matplotlib style) for each position in Panel.fields
_LINE_STYLES = (
  ("training", {"linewidth": 1.4}),
  ("validation", {"linewidth": 1.6, "marker": "o", "markersize": 4}),
  ("unigram entropy", {"linewidth": 1.2, "linestyle": (0, (1, 2))}),
)
# Okabe and Ito's palette for color-blind readers.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00")
# Color and dashes of each run, valid in CSS and in Matplotlib.
RUN_LINES = [
  (color, dashes)
  for dashes in ("solid", "dashed", "dotted")
  for color in _COLORS
]
_NUM_MEANS = 200  # means of points, drawn if a line has more than 400 points
_LOG_RATIO = 15  # y is logarithmic if largest / smallest value is above this


def check_can_draw() -> None:
  """Raises UserError unless Matplotlib is installed."""
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError(
      "pictures are drawn with Matplotlib, which is not installed: "
      f"{sys.executable} -m pip install 'matplotlib>=3.10,<4'"
    )


def choose_panels(runs: Sequence[Run]) -> list[Panel]:
  """Returns the panels for which runs have numbers, those of _PANELS first."""
  fields = dict.fromkeys(x for run in runs for line in run.lines for x in line)
  values = {x: {y for run in runs for y in run.values(x)} for x in fields}
  found = [p for p in _PANELS if any(values.get(x) for x in p.fields)]
  known = {"step", "tokens", *(x for panel in _PANELS for x in panel.fields)}
  for field, numbers in values.items():
    # Skip fields of traced steps, which trace files show, and skip constants.
    if field not in known and field[:7] != "traced_" and len(numbers) > 1:
      quantity, _, part = field.partition("/")  # as in host_memory_bytes/pod_0
      unit = {"secs": "s", "bytes": "B"}.get(quantity.rpartition("_")[2], "")
      start = _QUANTITIES.get(quantity)
      found.append(Panel(f"{start} {part}" if start else field, (field,), unit))
  return found


def render_image(runs: Sequence[Run], panel: Panel) -> str:
  """Returns a panel as a PNG image in a data: URL."""
  file = io.BytesIO()
  # Transparent, because the page's background may be light or dark.
  draw(runs, panel).savefig(file, format="png", dpi=160, transparent=True)
  return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def draw(runs: Sequence[Run], panel: Panel) -> Any:
  """Returns a Matplotlib figure with the lines and the rewinds of all runs."""
  from matplotlib.figure import Figure

  is_wide = len(panel.fields) > 1
  figure = Figure(figsize=(8, 3) if is_wide else (4, 2.5), layout="constrained")
  axes = figure.add_subplot()
  styles = [style for _, style in _LINE_STYLES]
  if len(runs) == 1 and is_wide:
    colors = (*_COLORS[:2], "0.5")
    styles = [{"color": x} | y for x, y in zip(colors, styles, strict=True)]
  # If every line of metrics.jsonl has a token count, x is in tokens, because
  # batch sizes may differ between runs.
  tokens = [line.get("tokens") for run in runs for line in run.lines]
  x_field = "tokens" if all(map(is_number, tokens)) else "step"
  for i, run in enumerate(runs):
    color, dashes = RUN_LINES[i % len(RUN_LINES)]
    for j, (field, kind) in enumerate(zip(panel.fields, styles, strict=False)):
      points = run.points(field, x_field)
      if field == "unigram_entropy" and points:
        points.insert(0, (0, points[0][1]))  # the entropy is the same at step 0
      line = {"color": color, "linestyle": dashes} | kind
      if is_wide and len(runs) > 1 and j == 0:
        line["alpha"] = 0.5
      _draw_points(axes, points, line)
    for rewind in run.rewinds:
      x = _find_x(run, rewind["step"], x_field)
      back_to = _find_x(run, rewind["to_step"], x_field)
      axes.axvline(x, color=color, linewidth=0.8, linestyle="dotted")
      # Shade the steps that the rewind undid.
      axes.axvspan(back_to, x, color=color, alpha=0.1, linewidth=0)
  if is_wide:
    # With several runs, legend lines are gray, because runs differ in color.
    for (label, _), style in zip(_LINE_STYLES, styles, strict=True):
      axes.plot([], [], label=label, **{"color": "0.4"} | style)
    axes.legend(frameon=False)
  _set_axes(axes, panel, x_field)
  return figure


def _draw_points(
  axes: Any, points: Sequence[tuple[float, float]], style: dict[str, Any]
) -> None:
  if len(points) == 1:
    style = {"marker": "o", "markersize": 4, **style}
  elif len(points) > 2 * _NUM_MEANS:
    # Draw a faint line with every point, so that spikes show, and a line with
    # means of neighbors.
    axes.plot(*zip(*points, strict=True), **{**style, "alpha": 0.25})
    bins = np.array_split(np.array(points), _NUM_MEANS)
    points = [each.mean(axis=0) for each in bins]
  if points:
    axes.plot(*zip(*points, strict=True), **style)


def _find_x(run: Run, step: float, x_field: str) -> float:
  # Interpolate x between the steps in metrics.jsonl.
  steps, xs = zip((0, 0), *run.points(x_field, "step"), strict=True)
  if step > steps[-1] > 0:
    # The run was rewound and ended before it reached this step again.
    return xs[-1] * step / steps[-1]
  return float(np.interp(step, steps, xs))


def format_bytes(count: float, digits: int = 1) -> str:
  """Returns a number of bytes as MiB or GiB, or as KiB below one MiB."""
  for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
    if count >= size:
      return f"{count / size:,.{digits}f} {unit}"
  return f"{count / 2**10:,.{digits}f} KiB" if count else "0"


def _set_axes(axes: Any, panel: Panel, x_field: str) -> None:
  from matplotlib import ticker

  axes.spines[:].set_visible(False)
  axes.grid(axis="y", alpha=0.3)
  axes.set_xlabel("tokens" if x_field == "tokens" else "steps")
  axes.set_xlim(left=0)
  # Write 780e9 tokens as 780B; EngFormatter writes 780G.
  short = ticker.EngFormatter(sep="")
  axes.xaxis.set_major_formatter(lambda x, _: short(x).replace("G", "B"))
  low, high = axes.dataLim.intervaly
  if panel.unit:
    axes.set_ylim(0, 1.1 * high or 1)
    formatter = ticker.EngFormatter(panel.unit)
    if panel.unit == "%":
      formatter = ticker.PercentFormatter(1.0)
    elif panel.unit == "B":
      formatter = ticker.FuncFormatter(lambda x, _: format_bytes(x, digits=0))
      power = math.floor(math.log2(max(high, 4) / 3))
      axes.yaxis.set_major_locator(ticker.MultipleLocator(2.0**power))
    axes.yaxis.set_major_formatter(formatter)
  elif 0 < low * _LOG_RATIO < high:
    axes.set_yscale("log", subs=(2, 5))
    axes.yaxis.set(major_formatter="{x:g}", minor_formatter="{x:g}")
