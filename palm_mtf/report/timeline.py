# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Draws a traced step: a lane for each pod, and for each way between two.

A pod's bars are what it computes, by phase. Those of a way are dark while
something is on it, light while something is only ready to be sent. Below them
is marked when the pod that receives computes nothing meanwhile.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from palm_mtf.report import figures
from palm_mtf.report.style import LIGHT
from palm_mtf.report.traces import Intervals, Timeline, Way

# Color and meaning of each kind of bar, in the order of the legend.
_KINDS = {
  "forward": ("run-5", "A: forward"),
  "backward": ("run-0", "A: backward"),
  "exchange": ("run-3", "sum over pods"),
  "update": ("run-2", "B: update"),
  "transfer": ("run-4", "transfer"),
  "waiting": ("run-4", "ready to be sent"),
  "exposed": ("run-1", "exposed: nothing else to compute"),
}
_WAITING_ALPHA = 0.3
_WIDTH, _LANE_HEIGHT, _FRAME_HEIGHT = 13.0, 0.66, 1.2  # inches


def headline(timeline: Timeline) -> str:
  """Returns the numbers of a traced step in one line."""
  numbers = timeline.figures
  text = f"step {timeline.step} took {_ms(numbers['traced_step_secs'])}"
  if len(timeline.pods) == 1:
    return text
  text += f"; {numbers['traced_dcn_bytes'] / 1e6:,.1f} MB crossed between pods"
  if "traced_gbits_per_sec" not in numbers:
    return f"{text}, in memory"
  return (
    f"{text} at {numbers['traced_gbits_per_sec']:.2f} Gb/s, "
    f"{_ms(numbers['traced_hidden_secs'])} of it hidden behind computation, "
    f"{_ms(numbers['traced_exposed_secs'])} exposed"
  )


def png(timeline: Timeline) -> bytes:
  """Returns the picture as the content of a file."""
  import matplotlib

  with matplotlib.rc_context(figures.settings(LIGHT)):
    return figures.png(_drawn(timeline, LIGHT, headline(timeline)))


def svg(timeline: Timeline, prefix: str) -> str:
  """Returns the picture as an element of a page; ids begin with `prefix`."""
  import matplotlib

  colors = figures.PAGE_COLORS
  with matplotlib.rc_context(figures.settings(colors)):
    figure = _drawn(timeline, colors, "")
    return figures.inlined(figure, prefix, headline(timeline))


def _drawn(timeline: Timeline, colors: Mapping[str, str], title: str) -> Any:
  from matplotlib.figure import Figure
  from matplotlib.patches import Patch

  lanes = [*map(_pod_lane, timeline.pods), *map(_way_lane, timeline.ways)]
  height = _FRAME_HEIGHT + _LANE_HEIGHT * len(lanes)
  figure = Figure(figsize=(_WIDTH, height), layout="constrained")
  axes = figure.add_subplot()
  for number, lane in enumerate(lanes):
    for kind, intervals, top, bottom in lane:
      where = number + top, bottom - top
      _draw_bars(axes, intervals, where, _look(kind, colors))
  if timeline.last_call:
    axes.axvline(
      timeline.last_call / 1e3,
      color=colors["muted"],
      linewidth=0.8,
      linestyle=(0, (2, 2)),
    )
  axes.set_yticks(range(len(lanes)), list(_labels(timeline)))
  axes.set_ylim(len(lanes) - 0.5, -0.5)
  axes.set_xlim(0, timeline.end / 1e3)
  axes.xaxis.set_major_formatter("{x:,.5g}")
  axes.tick_params(length=0)
  axes.tick_params(axis="y", labelcolor=colors["ink"])
  axes.grid(axis="x")
  axes.set_axisbelow(True)
  axes.set_xlabel(_x_label(timeline), loc="right")
  drawn = {kind for lane in lanes for kind, *_ in lane}
  figure.legend(
    handles=[
      Patch(linewidth=0, label=says, **_look(kind, colors))
      for kind, (_, says) in _KINDS.items()
      if kind in drawn
    ],
    loc="outside lower left",
    ncols=len(_KINDS),
    frameon=False,
    handlelength=1.1,
    columnspacing=1.6,
  )
  if title:
    figure.suptitle(title, x=0.01, ha="left", fontsize=11, fontweight="bold")
  return figure


_Bars = tuple[str, Intervals, float, float]  # a kind, when, top, bottom


def _pod_lane(phases: Mapping[str, Intervals]) -> list[_Bars]:
  """Returns the bars of a pod: short phases lie on long ones."""
  return [
    (kind, phases[kind], -0.36, 0.36) for kind in _KINDS if phases.get(kind)
  ]


def _way_lane(way: Way) -> list[_Bars]:
  bars = [
    ("waiting", way.waiting, -0.36, 0.14),
    ("transfer", way.transfers, -0.36, 0.14),
    ("exposed", way.exposed, 0.2, 0.36),
  ]
  return [each for each in bars if each[1]]


def _look(kind: str, colors: Mapping[str, str]) -> dict[str, Any]:
  alpha = _WAITING_ALPHA if kind == "waiting" else 1.0
  return {"color": colors[_KINDS[kind][0]], "alpha": alpha}


def _draw_bars(
  axes: Any,
  intervals: Intervals,
  where: tuple[float, float],
  look: Mapping[str, Any],
) -> None:
  """Draws bars at a height, and of a height, in milliseconds."""
  widths = [(start / 1e3, (end - start) / 1e3) for start, end in intervals]
  # The edge is for a bar that is thinner than a dot.
  axes.broken_barh(widths, where, linewidth=0.3, **look)


def _labels(timeline: Timeline) -> Iterator[str]:
  for pod in range(len(timeline.pods)):
    yield f"pod {pod}"
  for way in timeline.ways:
    yield (
      f"pod {way.source} \u2192 pod {way.target}\n"
      f"{way.num_bytes / 1e6:,.1f} MB, {_ms(way.exposed_usecs / 1e6)} exposed"
    )


def _x_label(timeline: Timeline) -> str:
  return (
    "ms; dotted: the last microbatches begin" if timeline.last_call else "ms"
  )


def _ms(secs: float) -> str:
  return f"{1e3 * secs:,.3g} ms" if secs < 1 else f"{1e3 * secs:,.0f} ms"
