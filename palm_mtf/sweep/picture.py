# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of a sweep: loss against time, tokens and FLOPs, and the law."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from palm_mtf.sweep.results import read_curve
from palm_mtf.sweep.runs import SweepRun

_PANELS = (
  ("secs", "seconds of steps"),
  ("tokens", "tokens"),
  ("flops", "FLOPs"),
)


def picture(runs: Sequence[SweepRun], law: Mapping[str, Any] | None) -> bytes:
  """Returns a PNG: one line per run, one color per size, dashed if held out.

  Args:
    runs: runs of the sweep; a run without an evaluation has no line.
    law: result of `law_record`, or None.
  """
  from matplotlib import colormaps, ticker
  from matplotlib.figure import Figure

  figure = Figure(figsize=(12, 4.8), layout="constrained")
  panels = figure.subplots(1, len(_PANELS), sharey=True)
  sizes = sorted({run.num_parameters for run in runs})
  # Its last color is too light for a line.
  shades = colormaps["viridis"].resampled(len(sizes) + 1)
  colors = {size: shades(i) for i, size in enumerate(sizes)}
  named = set()
  for run in sorted(runs, key=lambda run: run.num_parameters):
    curve, style = read_curve(run), {"color": colors[run.num_parameters]}
    name = f"{run.num_parameters:,} parameters"
    if run.is_held_out:
      style |= {"linestyle": "dashed", "fillstyle": "none"}
      name += ", held out"
    for axes, (field, _) in zip(panels, _PANELS, strict=True):
      # The marker is at the last loss, where the schedule has ended.
      axes.plot(
        getattr(curve, field),
        curve.losses,
        linewidth=0.9,
        marker="o",
        markersize=5,
        markevery=[-1] if curve.losses else [],
        label=None if name in named else name,
        **style,
      )
      named.add(name)
  if law:
    _draw_law(panels[-1], law)
  for axes, (_, title) in zip(panels, _PANELS, strict=True):
    axes.set_xlabel(title)
    axes.set_xscale("log")
    # Tokens span too few decades for labels only at powers of ten.
    subs = (1, 2, 5) if title == "tokens" else (1,)
    axes.xaxis.set_major_locator(ticker.LogLocator(subs=subs))
    axes.xaxis.set_minor_formatter(ticker.NullFormatter())
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.3)
  panels[1].xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
  panels[0].set_ylabel("validation loss (nats/token)")
  figure.legend(loc="outside lower center", ncols=4, frameon=False)
  file = io.BytesIO()
  figure.savefig(file, format="png", dpi=110)
  return file.getvalue()


def _draw_law(axes: Any, law: Mapping[str, Any]) -> None:
  """Draws the lowest loss for each number of FLOPs, and its interval."""
  flops = [x["flops"] for x in law["frontier"]]
  losses, low, high = zip(*(x["loss"] for x in law["frontier"]), strict=True)
  axes.plot(flops, losses, color="0.2", label="scaling law, best size")
  axes.fill_between(
    flops, low, high, color="0.2", alpha=0.15, linewidth=0, label="95% interval"
  )
