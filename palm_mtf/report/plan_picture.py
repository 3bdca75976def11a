# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The picture of a plan: memory and step time by part."""

import io
from collections.abc import Mapping
from typing import Any

from palm_mtf.model_dir.atomic_files import write_atomically


def write_plan_picture(plan: Mapping[str, Any], path: str) -> None:
  """Writes a PNG of two bars, a device's memory and a step's time by part."""
  from matplotlib.figure import Figure

  figure = Figure(figsize=(9, 4), layout="constrained")
  memory, time = figure.subplots(2, 1)
  in_gib = {k: v / 2**30 for k, v in plan["device_bytes"].items()}
  _bar(memory, in_gib, "memory of a device (GiB)")
  memory.axvline(plan["memory_bytes"] / 2**30, color="0.4", linestyle="dashed")
  _bar(time, plan["parts"], "step, one part after another (s)")
  file = io.BytesIO()
  figure.savefig(file, format="png", dpi=160)
  write_atomically(path, file.getvalue())


def _bar(axes: Any, parts: Mapping[str, float], title: str) -> None:
  left = 0.0
  for name, width in parts.items():
    axes.barh(0, width, left=left, label=f"{name} {width:.3g}")
    left += width
  axes.set_title(title, loc="left", fontsize="medium")
  axes.set_yticks([])
  axes.spines[:].set_visible(False)
  axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
