# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Figures show every logged number with its unit."""

import math

import numpy as np
import pytest

from palm_mtf.report.figures import (
  RUN_LINES,
  Panel,
  choose_panels,
  draw,
  render_image,
)
from palm_mtf.report.runs import Run
from tests.report.conftest import log_line

LOSS = Panel("Loss", ("loss", "validation_loss", "unigram_entropy"))


def a_run(*lines, rewinds=()) -> Run:
  return Run("a", lines, rewinds, (), (), {}, set(), {})


def axes_of(runs, panel):
  figure = draw(runs, panel)
  figure.draw_without_rendering()  # makes the tick labels
  return figure.axes[0]


def labels(axis) -> set[str]:
  return {x.get_text() for x in axis.get_ticklabels(which="both")}


def test_each_field_with_numbers_has_a_panel():
  lines = [log_line(1), log_line(2, validation_loss=7.0)]
  assert [panel.title for panel in choose_panels([a_run(*lines)])] == [
    *("Loss (nats/token)", "Learning rate", "Gradient norm before clipping"),
    *("Speed (tokens/s)", "MFU (% of the chips' peak)", "Step time"),
  ]
  # A new field has a panel if it changes, unless it is a field of traces.
  lines = [
    {"step": x, "same": 1, "rms/mlp": x, "new_secs": x, "traced_secs": x}
    | {"update_rms/mlp": x, "host_memory_bytes/pod_0": x}
    for x in (1, 2)
  ]
  assert choose_panels(
    [a_run(*lines), a_run({"step": 1, "loss": math.nan})]
  ) == [
    Panel("rms/mlp", ("rms/mlp",)),
    Panel("new_secs", ("new_secs",), "s"),
    Panel("RMS of updates: mlp", ("update_rms/mlp",)),
    Panel("Memory of pod_0", ("host_memory_bytes/pod_0",), "B"),
  ]


def test_lines_have_the_points_of_each_run_in_its_color():
  first = a_run(
    log_line(1, unigram_entropy=9.0),
    log_line(2, loss=math.nan),
    log_line(3, validation_loss=7.5),
  )
  axes = axes_of([first, a_run(log_line(1), log_line(4, loss=2.5))], LOSS)
  blue, red = (color for color, _ in RUN_LINES[:2])
  assert [
    (x.get_color(), x.get_xydata().tolist())
    for x in axes.lines
    if len(x.get_xydata())
  ] == [
    (blue, [[64, 7.99], [192, 7.97]]),
    (blue, [[192, 7.5]]),
    (blue, [[0, 9], [64, 9]]),
    (red, [[64, 7.99], [256, 2.5]]),
  ]
  legend = [x.get_text() for x in axes.get_legend().get_texts()]
  assert legend == ["training", "validation", "unigram entropy"]


def test_x_is_tokens_if_all_runs_have_them():
  with_tokens = a_run(log_line(1), log_line(2, tokens=6e9))
  without = a_run(log_line(1, tokens=None), {"step": 2000, "loss": 2.0})
  axes = axes_of([with_tokens], LOSS)
  assert axes.get_xlabel() == "tokens" and "6B" in labels(axes.xaxis)
  axes = axes_of([with_tokens, without], LOSS)
  assert axes.get_xlabel() == "steps" and "2k" in labels(axes.xaxis)


@pytest.mark.parametrize(
  ("unit", "high", "label"),
  [
    ("%", 0.5, "40%"),
    ("s", 0.0042, "4 ms"),
    ("s", 0, "0 s"),
    ("B", 4.2e9, "3 GiB"),
    ("/s", 8100, "8 k/s"),
    ("", 10, "8"),
    ("", 200, "50"),  # logarithmic
  ],
)
def test_tick_labels_have_units(unit, high, label):
  run = a_run({"step": 1, "y": min(1, high)}, {"step": 2, "y": high})
  axes = axes_of([run], Panel("y", ("y",), unit))
  assert label in labels(axes.yaxis)
  assert axes.get_yscale() == ("log" if high == 200 else "linear")


@pytest.mark.parametrize("last_step", [20, 12])  # 12: the run has not caught up
def test_a_rewind_is_marked_from_its_step_back(last_step):
  rewind = {"step": 15, "to_step": 5}
  run = a_run(log_line(10), log_line(last_step), rewinds=[rewind])
  axes = axes_of([a_run(log_line(1)), run], Panel("MFU", ("mfu",)))
  assert axes.lines[-1].get_color() == RUN_LINES[1][0]
  assert list(axes.lines[-1].get_xdata()) == [15 * 64] * 2
  (span,) = axes.patches
  assert (span.get_x(), span.get_width()) == (5 * 64, 10 * 64)


def test_a_long_run_has_its_points_and_means_of_neighbors():
  run = a_run(*({"step": i, "y": i % 10} for i in range(100_000)))
  points, means = axes_of([run], Panel("y", ("y",))).lines
  assert len(points.get_xydata()) == 100_000
  np.testing.assert_allclose(means.get_ydata(), [4.5] * 200)
  assert means.get_alpha() is None and points.get_alpha() < 0.5


@pytest.mark.parametrize("y", [[2.0], [0], [-1, 3], [0, 900], [1e-9, 1e9]])
@pytest.mark.parametrize("unit", ["", "s"])
def test_any_numbers_make_the_same_image_each_time(y, unit):
  run = a_run(*({"step": i, "y": each} for i, each in enumerate(y)))
  panel = Panel("y", ("y",), unit)
  url = render_image([run], panel)
  assert url.startswith("data:image/png;base64,iVBORw0KGgo")
  assert url == render_image([run], panel)
