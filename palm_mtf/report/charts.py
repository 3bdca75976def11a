# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a panel: curves of runs against tokens or steps."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from palm_mtf.report.figures import (
  NUM_RUN_COLORS,
  PAGE_COLORS,
  inlined,
  settings,
)
from palm_mtf.report.panels import Curve, Panel

_DASHES = ["solid", (0, (5, 2)), (0, (1.5, 1.5))]
_MAX_POINTS = 600  # of a curve: more than a screen has columns
_STEPS = [1, 2, 2.5, 5, 10]  # between the ticks of an axis
_LOG_RATIO = 15  # of the largest number to the smallest
_SIZES = {False: (3.6, 2.3), True: (15.0, 4.4)}  # inches of 72 pixels
_SI = [(1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")]
_SMALL_SECS = [(1.0, "s"), (1e-3, "ms"), (1e-6, "\u00b5s")]
_BYTES = [(2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (1024, "KiB")]


def short_number(value: float) -> str:
  """Writes 2457600 as "2.4576M"; five digits at most."""
  for size, letter in _SI:
    if abs(value) >= size:
      return f"{value / size:.5g}{letter}"
  return f"{value:.5g}"


def _short_secs(value: float) -> str:
  for size, unit in _SMALL_SECS:
    if abs(value) >= size:
      return f"{value / size:,.4g} {unit}"
  return "0" if value == 0 else f"{value:.3g} s"


def short_bytes(value: float) -> str:
  """Writes 1610612736 as "1.5 GiB"."""
  for size, unit in _BYTES:
    if abs(value) >= size:
      return f"{value / size:,.3g} {unit}"
  return f"{value:,.0f} B" if value else "0"


def _unit_of_bytes(value: float) -> float:
  return next((size for size, _ in _BYTES if value >= size), 1.0)


_FORMS: dict[str, Callable[[float], str]] = {
  "number": "{:,.4g}".format,
  "count": lambda value: (
    f"{value:,.0f}" if value < 1e7 else short_number(value)
  ),
  "percent": lambda value: f"{100 * value:.4g}%",
  "secs": _short_secs,
  "bytes": short_bytes,
}


def draw(panel: Panel, number: int, x_field: str) -> str:
  """Returns a panel as an <svg> element.

  Args:
    panel: what to draw.
    number: number of the panel on its page, which makes its ids its own.
    x_field: "tokens" or "step".
  """
  import matplotlib
  from matplotlib.figure import Figure

  with matplotlib.rc_context(settings(PAGE_COLORS)):
    figure = Figure(figsize=_SIZES[panel.is_wide], layout="constrained")
    axes = figure.add_subplot()
    for curve in panel.curves:
      _draw_curve(axes, curve)
    for mark in panel.marks:
      color = _run_color(mark.run)
      axes.axvline(mark.x, color=color, linewidth=0.9, linestyle=(0, (2, 2)))
      if mark.back_to is not None:
        axes.axvspan(mark.back_to, mark.x, color=color, alpha=0.1, linewidth=0)
    _set_axes(axes, panel, x_field)
    return inlined(figure, f"p{number}", panel.title)


def _run_color(run: int) -> str:
  return PAGE_COLORS[f"run-{run % NUM_RUN_COLORS}"]


def dashes(run: int) -> Any:
  """Returns how the line of a run is broken: otherwise where colors repeat."""
  return _DASHES[run // NUM_RUN_COLORS % len(_DASHES)]


def _draw_curve(axes: Any, curve: Curve) -> None:
  style = {"color": _run_color(curve.run), "linestyle": dashes(curve.run)}
  if curve.style == "level":
    style |= {"linewidth": 1.2, "linestyle": (0, (1, 2))}
    axes.axhline(curve.points[-1][1], **style)
    return
  if curve.style == "dots":
    style |= {"linewidth": 1.0, "marker": "o", "markersize": 4.5, "zorder": 3}
  else:
    style["linewidth"] = 1.3
  for points in pieces(curve.points):
    if len(points) > _MAX_POINTS:
      xs, lows, ys, highs = thinned(points)
      fill = {"color": style["color"], "alpha": 0.2, "linewidth": 0}
      axes.fill_between(xs, lows, highs, **fill)
    else:
      xs, ys = zip(*points, strict=True)
    single = {"marker": "o", "markersize": 3} if len(points) == 1 else {}
    axes.plot(xs, ys, **{**single, **style})


def pieces(points: Sequence[tuple[float, float]]) -> list[list[tuple]]:
  """Splits points where x goes back, as in a run that was taken back."""
  pairs = enumerate(itertools.pairwise(points), start=1)
  cuts = [i for i, (a, b) in pairs if b[0] < a[0]]
  ends = [0, *cuts, len(points)]
  return [list(points[a:b]) for a, b in itertools.pairwise(ends)]


def thinned(
  points: Sequence[tuple[float, float]],
) -> tuple[list[float], list[float], list[float], list[float]]:
  """Returns x and the lowest, mean and highest y of runs of points."""
  size = -(-len(points) // _MAX_POINTS)
  bins = [points[i : i + size] for i in range(0, len(points), size)]
  ys = [[y for _, y in each] for each in bins]
  return (
    [each[-1][0] for each in bins],
    [min(each) for each in ys],
    [sum(each) / len(each) for each in ys],
    [max(each) for each in ys],
  )


def _set_axes(axes: Any, panel: Panel, x_field: str) -> None:
  from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
  )

  ys = [y for curve in panel.curves for _, y in curve.points]
  form = _FORMS[panel.form]
  axes.grid(axis="y")
  axes.tick_params(length=0)
  axes.set_axisbelow(True)
  axes.set_xlim(left=0)
  axes.xaxis.set_major_locator(
    MaxNLocator(10 if panel.is_wide else 5, steps=_STEPS)
  )
  axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: short_number(x)))
  axes.set_xlabel("tokens" if x_field == "tokens" else "steps", loc="right")
  if not panel.from_zero and 0 < min(ys) * _LOG_RATIO < max(ys):
    axes.set_yscale("log")
    few = max(ys) / min(ys) < 1000
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    axes.minorticks_off()
  else:
    most = MaxNLocator(6 if panel.is_wide else 5, steps=_STEPS)
    unit = _unit_of_bytes(max(ys)) if panel.form == "bytes" else 1.0
    low, high = (y / unit for y in axes.get_ylim())
    if panel.from_zero:
      low, high = 0.0, max(ys) * 1.08 / unit or 1.0
    axes.yaxis.set_major_locator(
      FixedLocator([unit * y for y in most.tick_values(low, high)])
    )
    axes.set_ylim(unit * low, unit * high)
  axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: form(y)))
