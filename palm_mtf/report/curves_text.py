# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What-if curves for people: tables, and a picture."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from palm_mtf.model_dir.atomic_files import write_atomically

Curves = Mapping[str, Sequence[Mapping[str, Any]]]


def curves_text(curves: Curves) -> str:
  """Returns a table for each setting (accounting/plan.py)."""
  lines = []
  for macro, points in curves.items():
    lines.append(
      f"{macro:<20}{'sequences':>10}{'s/step':>10}{'tokens/s':>13}{'MFU':>7}"
    )
    lines += [
      f"{each['value']:>20,.5g}{each['batch_size']:>10,}"
      f"{each['step_secs']:>10.4g}{each['tokens_per_sec']:>13,.0f}"
      f"{each['mfu']:>7.1%}{'' if each['fits'] else '  does not fit'}"
      for each in points
    ]
  return "\n".join(lines)


def write_curves_picture(curves: Curves, path: str) -> None:
  """Writes a PNG of step time and MFU against each setting."""
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
  file = io.BytesIO()
  figure.savefig(file, format="png", dpi=160)
  write_atomically(path, file.getvalue())
