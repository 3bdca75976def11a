# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What all pictures share: colors, settings, and how they get on a page.

On the page a color is written as `var(--run-0)`, `var(--ink)` and so on, which
the page defines once for light and once for dark. Text stays text, in the
page's font.
"""

import importlib.util
import io
import re
import sys
from collections.abc import Mapping
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.report.style import LIGHT

# How Matplotlib is told a color of the page: as a blue that nothing else has.
PAGE_COLORS = {name: f"#0001{i:02x}" for i, name in enumerate(LIGHT)}
NUM_RUN_COLORS = sum(name.startswith("run-") for name in LIGHT)


def check_can_draw(what: str) -> None:
  """Raises UserError unless Matplotlib is there, with which `what` draws."""
  if importlib.util.find_spec("matplotlib") is None:
    raise UserError(
      f"{what} draws with Matplotlib, which is not installed: "
      f"{sys.executable} -m pip install 'matplotlib>=3.10,<4'"
    )


def settings(colors: Mapping[str, str]) -> dict[str, Any]:
  """Returns what Matplotlib's rc_context is given."""
  return {
    "svg.fonttype": "none",
    "svg.hashsalt": "palm_mtf",  # the same ids each time
    "font.size": 10,
    "text.color": colors["ink"],
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.edgecolor": colors["grid"],
    "xtick.color": colors["muted"],
    "ytick.color": colors["muted"],
    "axes.labelcolor": colors["muted"],
    "grid.color": colors["grid"],
    "grid.linewidth": 0.7,
    "lines.solid_capstyle": "round",
  }


def inlined(figure: Any, prefix: str, title: str) -> str:
  """Returns a figure as an <svg> element of a page.

  Ids get `prefix`, stand-ins become the page's colors, and what is for a file
  alone goes: namespaces, description, fonts, the global style.
  """
  file = io.StringIO()
  figure.savefig(file, format="svg", transparent=True)
  svg = file.getvalue()
  view = re.search(r'viewBox="([^"]+)"', svg)[1]
  body = svg[svg.index(">", svg.index("<svg")) + 1 :]
  body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
  body = re.sub(r"<style.*?</style>", "", body, flags=re.DOTALL)
  body = re.sub(r"<!--.*?-->", "", body, flags=re.DOTALL)
  body = body.replace("xlink:href", "href")
  body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{prefix}-", body)
  body = re.sub(
    r"(font-family: [^;\"]*; )|( transform=\"rotate\(-0 [^\"]*\")", "", body
  )
  for name, stand_in in PAGE_COLORS.items():
    body = body.replace(f": {stand_in}", f": var(--{name})")
  body = re.sub(r"\n\s*", "\n", body)
  return f'<svg viewBox="{view}" role="img" aria-label="{title}">{body}'
