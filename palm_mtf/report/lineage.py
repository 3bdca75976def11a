# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The report's picture of a lineage: models from left to right, as SVG."""

import html
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from palm_mtf.errors import shorten

_WIDTH, _HEIGHT = 190, 62  # of a model's box, in pixels
_RIGHT, _DOWN = _WIDTH + 100, _HEIGHT + 16  # from one box to the next
_LONGEST = 22  # characters of a line in a box
_FOUND = 'stroke="currentColor" stroke-opacity=".5"'
_LOST = 'stroke="#d55e00" stroke-width="2" stroke-dasharray="5 4"'


def render_lineage(models: Sequence[Mapping[str, Any]]) -> Iterator[str]:
  """Yields SVG of models as `palm_mtf lineage --json` has them, at least one.

  The first model is on the right. A model that is missing or changed has a
  dashed frame. Tooltips have whole paths and hashes, and changed settings.
  """
  columns, rows = [0], [0]
  for i, child in enumerate([x["child"] for x in models[1:]], start=1):
    # Models follow their children depth first, so that lower rows are free.
    is_first = all(x["child"] != child for x in models[:i])
    rows.append(rows[child] if is_first else max(rows) + 1)
    columns.append(columns[child] + 1)
  xs = [(max(columns) - x) * _RIGHT + 1 for x in columns]
  ys = [y * _DOWN + 1 for y in rows]
  size = f'width="{max(xs) + _WIDTH + 1}" height="{max(ys) + _HEIGHT + 1}"'
  yield f'<div class="table"><svg {size} font-size="12" fill="currentColor">'
  for model, x, y in zip(models, xs, ys, strict=True):
    yield from _draw_model(model, x, y)
    if (child := model["child"]) is None:
      continue
    changes = (
      f"{name} = {shorten(after)} (was {shorten(before)})"
      for name, (before, after) in model["changed_settings"].items()
    )
    middle, y1, y2 = (z + _HEIGHT // 2 for z in (xs[child] - 81, y, ys[child]))
    curve = f"C{middle} {y1} {middle} {y2} {xs[child] - 1} {y2}m-7 -4l7 4l-7 4"
    yield f"<g><title>{_escape(model['kind'], *changes)}</title>"
    yield f'<path d="M{x + _WIDTH} {y1}{curve}" fill="none"'
    # A curve rises, so that below it is space for a text.
    above = y1 + (-6 if y1 == y2 else 16)
    yield f' stroke="currentColor"/><text x="{middle}" y="{above}"'
    yield f' text-anchor="middle">{_escape(model["kind"][:14])}</text></g>'
  yield "</svg></div>"


def _draw_model(model: Mapping[str, Any], x: int, y: int) -> Iterator[str]:
  path, digest, state = (model[name] for name in ("path", "blake2b", "state"))
  settings, found = model.get("settings", {}), state == "found"
  texts = str(settings.get("TASK") or settings.get("TEXT_FILES") or "")
  yield f"<g><title>{_escape(path, digest, state, texts)}</title>"
  yield f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"'
  yield f' fill="#8881" {_FOUND if found else _LOST}/>'
  lines = (
    os.path.basename(path.rpartition("/checkpoints/")[0] or path),
    f"step {model['step']}, {digest[:8]}" if "step" in model else digest[:8],
    "/".join(texts.split("/")[-2:]) if found else state.partition(":")[0],
  )
  for i, line in enumerate(lines):
    text = line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..."
    yield f'<text x="{x + 10}" y="{y + 19 + 17 * i}"'
    yield f' font-weight="{400 if i else 700}">{_escape(text)}</text>'
  yield "</g>"


def _escape(*lines: str) -> str:
  # XML has no control characters.
  shown = (x if x.isprintable() else shorten(x) for x in lines)
  return html.escape("\n".join(shown))
