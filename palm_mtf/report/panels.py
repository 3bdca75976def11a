# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which pictures a page has, of which fields of metrics.jsonl.

A field that is not named here has a picture too, unless it never changes: its
title is its name, its unit that name's ending.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from palm_mtf.report.runs import Run, is_number


@dataclasses.dataclass(frozen=True)
class Curve:
  """Numbers of one run.

  Attributes:
    run: index of the run.
    points: (x, y) in the order they were written.
    style: "line", "dots" (with a line through them) or "level", dotted.
  """

  run: int
  points: Sequence[tuple[float, float]]
  style: str = "line"


@dataclasses.dataclass(frozen=True)
class Mark:
  """Something that happened to one run.

  Attributes:
    run: index of the run.
    x: where.
    back_to: where training went on from, if it went back.
  """

  run: int
  x: float
  back_to: float | None = None


@dataclasses.dataclass(frozen=True)
class Panel:
  """One picture.

  Attributes:
    title: what it shows.
    unit: unit of y; "" for a plain number.
    curves: what is drawn.
    marks: what happened.
    form: how y is written: "number", "count", "percent", "secs" or "bytes".
    from_zero: whether the y axis begins at 0.
    is_wide: whether it has a row of its own.
  """

  title: str
  unit: str
  curves: Sequence[Curve]
  marks: Sequence[Mark] = ()
  form: str = "number"
  from_zero: bool = False
  is_wide: bool = False


@dataclasses.dataclass(frozen=True)
class Section:
  """Panels that belong together."""

  title: str
  panels: Sequence[Panel]


@dataclasses.dataclass(frozen=True)
class _Shown:
  """How a field is shown; as in Panel."""

  title: str
  unit: str = ""
  form: str = "number"
  from_zero: bool = False


_LOSS = {"loss": "line", "validation_loss": "dots", "unigram_entropy": "level"}
_SECTIONS = {
  "Optimization": {
    "learning_rate": _Shown("Learning rate", from_zero=True),
    "grad_norm": _Shown("Gradient norm", "before clipping"),
    "z_loss": _Shown("z-loss", "nats/token"),
  },
  "Speed and waiting": {
    "tokens_per_sec": _Shown("Speed", "tokens/s", "count", True),
    "mfu": _Shown("MFU", "% of the chips' peak", "percent", True),
    "data_wait_secs": _Shown("Waiting for data", "time a step", "secs", True),
    "checkpoint_wait_secs": _Shown(
      "Waiting for checkpoints", "since the point before", "secs", True
    ),
  },
}
# "update_rms/attention" is one picture of the section of update_rms.
_GROUPS = {
  "update_rms": "Root mean square of updates, before clipping",
  "parameter_rms": "Root mean square of parameters",
}
# What the x axis and the speed say already.
_NOT_DRAWN = {"step", "tokens", "step_secs"}
_TRACED = "traced_"  # what the pictures of traced steps say
_ENDINGS = {
  "_secs": _Shown("", "time", "secs", True),
  "_bytes": _Shown("", "size", "bytes", True),
  "_tokens": _Shown("", "tokens", "count", True),
  "_rms": _Shown("", "root mean square"),
}


def x_axis(runs: Sequence[Run]) -> str:
  """Returns what all pictures are drawn against: "tokens" or "step"."""
  return "tokens" if all(run.has_tokens for run in runs) else "step"


def sections(runs: Sequence[Run]) -> list[Section]:
  """Returns all pictures of the page, without those that have no numbers."""
  page = _Page(runs)
  found = [
    Section("Loss", page.loss()),
    *(
      Section(title, page.panels(fields)) for title, fields in _SECTIONS.items()
    ),
    *(Section(title, page.group(name)) for name, title in _GROUPS.items()),
    Section("More", page.others()),
  ]
  return [section for section in found if section.panels]


def events(
  run: Run, x_field: str
) -> list[tuple[float, float | None, Mapping[str, Any]]]:
  """Returns x, where training went back to, and the event, of each event."""
  lines = [(x["step"], x[x_field]) for x in run.lines if x_field in x]
  found = []
  for event in run.events:
    step, to_step = event.get("step"), event.get("to_step")
    if is_number(step) and lines:
      back_to = _interpolated(lines, to_step) if is_number(to_step) else None
      found.append((_interpolated(lines, step), back_to, event))
  return found


def _interpolated(lines: Sequence[tuple[float, float]], step: float) -> float:
  """Returns x at `step`, which may be between two lines or beyond the last."""
  below, above = (0, 0), None
  for line in lines:
    if line[0] <= step:
      below = max(below, line)
    elif above is None or line < above:
      above = line
  if above is None:  # beyond: at the rate of the whole run
    return below[1] * step / below[0] if below[0] else float(step)
  share = (step - below[0]) / (above[0] - below[0])
  return below[1] + share * (above[1] - below[1])


class _Page:
  """Makes the panels of all runs."""

  def __init__(self, runs: Sequence[Run]):
    self._runs, self._x = runs, x_axis(runs)
    self._fields = list(dict.fromkeys(x for run in runs for x in run.fields))
    self._marks = [
      Mark(i, x, back_to)
      for i, run in enumerate(runs)
      for x, back_to, _ in events(run, self._x)
    ]

  def loss(self) -> list[Panel]:
    curves = [
      curve
      for field, style in _LOSS.items()
      for curve in self._curves(field, style)
    ]
    panel = Panel("Loss", "nats/token", curves, self._marks, is_wide=True)
    return [panel] if curves else []

  def panels(self, shown: Mapping[str, _Shown]) -> list[Panel]:
    return [
      self._panel(field, how)
      for field, how in shown.items()
      if field in self._fields
    ]

  def group(self, name: str) -> list[Panel]:
    fields = [x for x in self._fields if x.startswith(f"{name}/")]
    return [
      self._panel(field, _Shown(field.removeprefix(f"{name}/")))
      for field in fields
    ]

  def others(self) -> list[Panel]:
    known = {
      *_NOT_DRAWN,
      *_LOSS,
      *(x for each in _SECTIONS.values() for x in each),
    }
    return [
      self._panel(field, _shown_by_name(field))
      for field in self._fields
      if field not in known
      and field.split("/")[0] not in _GROUPS
      and not field.startswith(_TRACED)
      and len({x for run in self._runs for x in run.values(field)}) > 1
    ]

  def _panel(self, field: str, how: _Shown) -> Panel:
    return Panel(
      how.title,
      how.unit,
      self._curves(field, "line"),
      self._marks,
      how.form,
      how.from_zero,
    )

  def _curves(self, field: str, style: str) -> list[Curve]:
    points = [run.points(field, self._x) for run in self._runs]
    return [Curve(i, each, style) for i, each in enumerate(points) if each]


def _shown_by_name(field: str) -> _Shown:
  endings = [ending for ending in _ENDINGS if field.endswith(ending)]
  title = field.removesuffix(endings[0]) if endings else field
  how = _ENDINGS[endings[0]] if endings else _Shown("")
  words = title.replace("_", " ").replace("/", ", ")
  return dataclasses.replace(how, title=words[:1].upper() + words[1:])
