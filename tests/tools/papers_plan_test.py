# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The page of predictions is the tool's, and what it calls no miss is none."""

import pytest

from tools.papers_plan import PAGE, rows, table

ROWS = rows()


def test_the_page_holds_the_table_of_today():
  assert table() in PAGE.read_text(encoding="utf-8")


def test_numbers_of_palms_run_are_within_10_percent_but_where_it_says_a_miss():
  compared = [
    x for x in ROWS if x.what.startswith("PaLM") and x.published and x.predicted
  ]
  assert len(compared) > 15
  far = {
    x.what: x.note
    for x in compared
    if x.predicted != pytest.approx(x.published, rel=0.1)
  }
  assert all(note.startswith("a miss") for note in far.values()), far
  assert len(far) == 1


def test_pipelines_compare_as_published_within_3_percent():
  pipelines = [x for x in ROWS if "pipeline" in x.what]
  assert len(pipelines) == 3
  for row in pipelines:
    assert row.predicted == pytest.approx(row.published, rel=0.03)


def test_what_is_not_predicted_says_why():
  assert all(x.note for x in ROWS if x.predicted is None)
