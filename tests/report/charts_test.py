# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A picture is a well-formed element in the colors of its page."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from palm_mtf.report.charts import draw, pieces, short_number, thinned
from palm_mtf.report.panels import Curve, Mark, Panel


def texts(svg: str) -> list[str]:
  return [x.text for x in ElementTree.fromstring(svg).iter("text")]


def path_points(svg: str) -> int:
  """The points of the longest path."""
  paths = re.findall(r'd="([^"]*)"', svg)
  return max(len(re.findall("[ML]", path)) for path in paths)


LINE = Curve(0, [(i * 1e6, 3 + i % 7) for i in range(10)])


@pytest.mark.parametrize(
  ("form", "high", "label"),
  [
    ("count", 8000, "8,000"),
    ("percent", 0.5, "40%"),
    ("secs", 0.004, "4 ms"),
    ("secs", 0, "0"),
    ("bytes", 4 * 2**30, "4 GiB"),
    ("bytes", 0, "0"),
    ("number", 0.01, "0.01"),
  ],
)
def test_numbers_have_units_and_thousands_separators(form, high, label):
  curve = Curve(0, [(0, 0), (1, high)])
  svg = draw(Panel("t", "", [curve], form=form, from_zero=True), 1, "tokens")
  assert label in texts(svg)


def test_the_x_axis_says_what_it_counts():
  panel = Panel("t", "", [LINE])
  assert {"tokens", "6M"} <= {*texts(draw(panel, 1, "tokens"))}
  assert "steps" in texts(draw(panel, 1, "step"))
  assert short_number(2_457_600) == "2.4576M"
  assert short_number(780e9) == "780B"


def test_wide_ranges_are_logarithmic():
  curve = Curve(0, [(0, 1), (1, 1000)])
  assert {"1", "10", "100", "1,000"} <= {
    *texts(draw(Panel("t", "", [curve]), 1, "step"))
  }


@pytest.mark.parametrize(
  "points", [[(5, 2.0)], [(0, 0)], [(1, -1), (2, 3)], [(1, 0), (2, 900)]]
)
@pytest.mark.parametrize("style", ["line", "dots", "level"])
@pytest.mark.parametrize("from_zero", [False, True])
def test_any_numbers_make_a_picture(points, style, from_zero):
  panel = Panel("t", "", [Curve(3, points, style)], from_zero=from_zero)
  ElementTree.fromstring(draw(panel, 1, "step"))


def test_colors_are_the_page_s_and_ids_the_picture_s_own():
  panel = Panel("t", "", [LINE, Curve(9, LINE.points)], [Mark(2, 1e6)])
  svg = draw(panel, 7, "tokens")
  assert not re.findall(r"#[0-9a-f]{6}\b(?!\")", svg)
  used = {*re.findall(r"var\(--([\w-]+)\)", svg)}
  # The ninth run's color is the first's again, and its line is broken.
  assert used == {"muted", "grid", "run-0", "run-1", "run-2"}
  assert "stroke-dasharray" in svg
  ids = re.findall(r'\bid="([^"]*)"', svg)
  assert all(each.startswith("p7-") for each in ids)
  referred = re.findall(r'href="#([^"]*)"|url\(#([^)]*)\)', svg)
  assert {a or b for a, b in referred} <= {*ids}
  assert len(ids) == len({*ids})


def test_the_same_panel_gives_the_same_bytes():
  panel = Panel("t", "", [LINE])
  assert draw(panel, 1, "tokens") == draw(panel, 1, "tokens")


def test_a_long_run_is_drawn_by_lowest_mean_and_highest_of_neighbors():
  points = [(i, i % 100) for i in range(100_000)]
  assert path_points(draw(Panel("t", "", [Curve(0, points)]), 1, "step")) < 2500
  xs, lows, means, highs = thinned([*points[:99_999], (100_000, 10**6)])
  assert (xs[-1], min(lows), max(highs)) == (100_000, 0, 10**6)
  size = xs[0] + 1
  assert means[0] == sum(y for _, y in points[:size]) / size


def test_a_line_is_broken_where_a_run_was_taken_back():
  points = [(1, 1), (2, 2), (1, 3), (2, 4)]
  assert pieces(points) == [points[:2], points[2:]]
  assert pieces(points[:2]) == [points[:2]]
