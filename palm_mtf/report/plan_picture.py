# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws pictures of a plan and of what-if curves."""

import io
from collections.abc import Mapping
from typing import Any

from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.report.plan_text import Curves


def write_plan_picture(plan: Mapping[str, Any], path: str) -> None:
  """Writes a PNG with two bars: memory per device and step time, by part."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 4), layout="constrained")
  memory, time = figure.subplots(2, 1)
  in_gib = {k: v / 2**30 for k, v in plan["device_bytes"].items()}
  _draw_bar(memory, in_gib, "memory per device (GiB)")
  memory.axvline(plan["memory_bytes"] / 2**30, color="0.4", linestyle="dashed")
  _draw_bar(time, plan["parts"], "step, one part after another (s)")
  _write_png(figure, path)


def _draw_bar(axes: Any, parts: Mapping[str, float], title: str) -> None:
  left = 0.0
  for name, width in parts.items():
    axes.barh(0, width, left=left, label=f"{name} {width:.3g}")
    left += width
  axes.set_title(title, loc="left", fontsize="medium")
  axes.set_yticks([])
  axes.spines[:].set_visible(False)
  axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def write_curves_picture(curves: Curves, path: str) -> None:
  """Writes a PNG that plots step time and MFU against each setting."""
  from matplotlib import ticker
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 2.5 * len(curves)), layout="constrained")
  rows = figure.subplots(len(curves), 2, squeeze=False)
  for (macro, points), axes in zip(curves.items(), rows, strict=True):
    for each, name in zip(axes, ("step_secs", "mfu"), strict=True):
      xs, ys = ([x[key] for x in points] for key in ("value", name))
      each.plot(xs, ys, marker="o", markersize=4)
      each.set_xscale("log", base=2)
      each.set_xlabel(macro)
      each.set_ylabel({"step_secs": "s/step", "mfu": "MFU"}[name])
      each.set_ylim(0, 1.1 * max(ys))
      each.xaxis.set_major_formatter(ticker.EngFormatter(sep=""))
      each.grid(alpha=0.3)
  _write_png(figure, path)


def _write_png(figure: Any, path: str) -> None:
  file = io.BytesIO()
  figure.savefig(file, format="png", dpi=160)
  write_atomically(path, file.getvalue())
