# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The page has all tables, figures and samples, and refers to nothing else."""

import json
from xml.etree import ElementTree

import pytest

from palm_mtf.report.figures import choose_panels
from palm_mtf.report.page import render_page
from palm_mtf.report.runs import read_runs
from tests.report.conftest import log_line

EVIL = "<script>alert('&lt;')</script>\" onload=\"x"
NONE = ("", "-")  # an empty cell


def read(*folders) -> ElementTree.Element:
  # In XML, an unclosed tag or an unescaped text is an error.
  return ElementTree.fromstring(render_page(read_runs(list(map(str, folders)))))


def texts(root, tag: str) -> list[str]:
  return ["".join(x.itertext()).strip() for x in root.iter(tag)]


def rows(root) -> dict[str, list[tuple[str, str]]]:
  """Returns the exact value and the text of each cell, by row."""
  return {
    texts(row, "th")[0]: [(x.get("title"), x.text) for x in row.iter("td")]
    for row in root.iter("tr")
  }


@pytest.fixture
def folders(write_run):
  """Two runs: one with all files, one with almost nothing."""
  lines = [
    log_line(10, validation_loss=7.5, host_memory_bytes=9000),
    log_line(20, validation_loss=6.54321, host_memory_bytes=9)
    | {"host_memory_bytes/pod_1": 7000},
  ]
  files = {
    "config.gin": f"SEED = 3\nLEARNING_RATE = 0.01\nTEXT = {EVIL!r}\n"
    "BETA1 = 0.9  # default\n",
    "samples.jsonl": [
      {"step": x, "prompt": "a < b", "continuation": EVIL} for x in (2000, 10)
    ],
    "plan.json": '{"mfu": 0.625, "step_secs": "soon", "run": {"secs": 9}}',
    "rewinds.jsonl": [{"step": 15, "to_step": 5, "skipped": [5, 2004]}],
  }
  config = {
    "config.gin": "SEED = 4  # default\nLEARNING_RATE = 0.01\n"
    "BETA1 = 0.9  # default\n"
  }
  bare = [{"step": 7, "loss": 5.0}, {"step": 8, EVIL: 1}, {"step": 9, EVIL: 2}]
  return [write_run("<i>", lines, files), write_run("bare", bare, config)]


def test_tables_have_the_exact_values_of_the_files(folders):
  found = rows(read(*folders))
  rewind = "step 15, to step 5, skipped [5, 2004]"
  expected = {
    "Validation loss (nats/token, last)": [("6.54321", "6.5432"), NONE],
    "Training loss (nats/token, last)": [("7.8", "7.8000"), ("5.0", "5.0000")],
    "Steps": [("20", "20"), ("9", "9")],
    "Tokens": [("1280", "1,280"), NONE],
    "Batch size (tokens, last)": [("64", "64"), NONE],
    "Speed (tokens/s, median)": [("8015.25", "8,015"), NONE],
    "Step time (s, median)": [("0.008", "0.008"), NONE],
    "MFU (median)": [("0.5", "50.0%"), NONE],
    "MFU (predicted)": [("0.625", "62.5%"), NONE],
    "Memory of the process (peak)": [("9000", "8.8 KiB"), NONE],
    "Memory of pod_1 (peak)": [("7000", "6.8 KiB"), NONE],
    "Rewind 1": [(rewind, rewind), NONE],
  }
  assert {row: found[row] for row in expected} == expected
  assert "Unigram entropy (nats/token)" not in found


def test_tasks_have_what_the_last_evaluated_checkpoint_measured(write_run):
  def outcome(step, accuracy):
    metrics = {"accuracy": accuracy, "best": "a text"}
    result = {"step": step, "task": "quiz", "split": EVIL, "metrics": metrics}
    return {f"eval/step_{step:08d}/quiz-test.json": json.dumps(result)}

  first = write_run("a", [log_line(1)], outcome(100, 25.0))
  files = outcome(200, 78.6667) | outcome(50, 1.0)
  found = rows(read(first, write_run("b", [log_line(1)], files)))
  assert found[f"quiz accuracy ({EVIL})"] == [
    ("25.0", "25.00 at\xa0step\xa0100"),
    ("78.6667", "78.67 at\xa0step\xa0200"),
  ]
  assert not any("best" in row for row in found)


def test_every_run_and_every_figure_is_there(folders):
  root = read(*folders)
  assert texts(root, "h1") == ["palm_mtf report: <i>, bare"]
  assert texts(root, "th")[1:3] == ["<i>", "bare"]
  titles = [x.title for x in choose_panels(read_runs(list(map(str, folders))))]
  assert texts(root, "figcaption") == titles and titles[-1] == EVIL
  images = list(root.iter("img"))
  assert [x.get("alt") for x in images] == titles
  assert len({x.get("src") for x in images}) == len(titles) > 5


def test_the_page_refers_to_nothing_outside_and_runs_nothing(folders):
  root = read(*folders)
  (style,) = texts(root, "style")
  assert "url(" not in style and "@import" not in style
  tags = {x.tag for x in root.iter()}
  assert not tags & {"script", "link", "iframe", "object", "base", "a"}
  names = {name for x in root.iter() for name in x.keys()}
  plain = {"alt", "charset", "class", "content", "lang", "name"}
  assert names == plain | {"open", "src", "style", "title"}
  for x in root.iter("img"):
    assert x.get("src").startswith("data:image/png;base64,")


def test_samples_are_text_in_the_order_of_steps(folders):
  root = read(*folders)
  assert texts(root, "p") == ["<i> step 10", "<i> step 2,000"]
  assert texts(root, "pre") == [f"a < b{EVIL}"] * 2


def test_settings_that_differ_have_a_separate_table(folders):
  root = read(*folders)
  tables = [texts(table, "th")[3:] for table in root.iter("table")]
  assert tables[-3:] == [
    ["SEED", "TEXT"],
    ["SEED", "LEARNING_RATE", "TEXT"],
    ["BETA1"],
  ]
  assert [x.get("open") for x in root.iter("details")] == ["", None]
  assert rows(root)["SEED"] == [("3", "3"), ("4", "4")]
  assert rows(root)["TEXT"] == [(repr(EVIL), repr(EVIL)), NONE]
  assert "Settings that differ" not in texts(read(folders[0]), "h2")


def test_the_page_of_one_run_names_it_once(folders):
  root = read(folders[0])
  assert "".join(root.itertext()).count("<i>") == 2  # title and heading
  assert texts(root, "p") == ["step 10", "step 2,000"]
