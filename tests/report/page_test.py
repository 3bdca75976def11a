# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The page as a browser reads it: what is on it, and that nothing else is."""

import html.parser
import re

import pytest

from palm_mtf.report.page import page
from palm_mtf.report.runs import read_runs
from tests.report.conftest import log_line

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(html.parser.HTMLParser):
  """Elements, with the text of each, of a page whose tags are balanced."""

  def __init__(self, text: str):
    super().__init__()
    self.elements: list[tuple[str, dict, list[str]]] = []
    self._open: list[tuple[str, list[str]]] = []
    self.feed(text)
    assert not self._open

  def handle_starttag(self, tag, attrs):
    texts: list[str] = []
    self.elements.append((tag, dict(attrs), texts))
    if tag not in VOID:
      self._open.append((tag, texts))

  def handle_startendtag(self, tag, attrs):
    self.elements.append((tag, dict(attrs), []))

  def handle_endtag(self, tag):
    assert self._open.pop()[0] == tag

  def handle_data(self, data):
    for _, texts in self._open:
      texts.append(data)

  def texts(self, tag: str) -> list[str]:
    return ["".join(texts) for name, _, texts in self.elements if name == tag]

  def rows(self) -> dict[str, list[tuple[str, str]]]:
    """The exact and the written value of every cell, by the row's title."""
    rows, title = {}, None
    for tag, attrs, texts in self.elements:
      if tag == "th" and attrs.get("scope") == "row":
        title = "".join(texts)
        rows[title] = []
      elif tag == "data":
        rows[title].append((attrs["value"], "".join(texts)))
    return rows


@pytest.fixture
def folders(write_run):
  """Two runs: all that a run may have, and next to nothing."""
  full = [
    log_line(10, validation_loss=7.5, unigram_entropy=9.0, memory_bytes=2**30),
    {"event": "rewind", "step": 10, "to_step": 5, "skipped": [5, 2004]},
    log_line(20, validation_loss=6.54321, unigram_entropy=9.0, memory_bytes=9),
  ]
  return [
    write_run(
      "full",
      full,
      config='SEED = 3\nTRAIN_STEPS = 2000\nLEARNING_RATE = 0.01\nX = "<b>"\n',
      samples=[
        {"step": s, "prompt": "a < b", "continuation": f" & {s}"}
        for s in (10, 2000)
      ],
      manifest={"shapes": {"w": [1000, 5]}, "version": "0.1.0"},
    ),
    write_run(
      "bare",
      [{"step": 7, "loss": 5.0}],
      config="SEED = 4\nLEARNING_RATE = 0.01\n",
    ),
  ]


def read(*folders) -> tuple[Page, str]:
  text = page(read_runs([str(folder) for folder in folders]))
  return Page(text), text


def test_the_values_of_the_table_are_those_of_the_files(folders):
  rows = read(folders[0])[0].rows()
  assert rows["Validation loss nats/token, last"] == [("6.54321", "6.5432")]
  assert rows["Training loss nats/token, last"] == [("7.8", "7.8000")]
  assert rows["Unigram entropy nats/token"] == [("9.0", "9.0000")]
  ((learnt, written),) = rows["Learnt from context nats/token"]
  assert float(learnt) == pytest.approx(9.0 - 6.54321)
  assert written == "2.4568"
  assert rows["Steps"] == [("20", "20 of 2,000")]
  assert rows["Tokens"] == [("1280", "1,280")]
  assert rows["Batch tokens, last"] == [("64", "64")]
  assert rows["Speed tokens/s, median"] == [("8020.25", "8,020")]
  assert rows["MFU median"] == [("0.5", "50.0%")]
  assert rows["Memory peak"] == [("1073741824", "1 GiB")]
  assert rows["Rewinds"] == [("1", "1")]
  assert rows["Parameters"] == [("5000", "5,000")]
  assert rows["Version"] == [("0.1.0", "0.1.0")]


def test_tasks_have_what_the_last_evaluated_checkpoint_measured(write_run):
  def outcome(step, accuracy):
    return {
      "step": step,
      "task": "quiz",
      "split": "test",
      "num_examples": 9,
      "metrics": {"accuracy": accuracy, "best": "a text"},
    }

  first = write_run("a", [log_line(1)], evaluations=[outcome(100, 25.0)])
  second = write_run(
    "b", [log_line(1)], evaluations=[outcome(200, 78.6667), outcome(50, 1.0)]
  )
  rows = read(first, second)[0].rows()
  assert rows["quiz accuracy test"] == [
    ("25.0", "25 at step 100"),
    ("78.6667", "78.67 at step 200"),
  ]
  assert not any("best" in title for title in rows)


def test_versions_of_several_packages_are_named(write_run):
  versions = {"palm_mtf": "0.1.0", "numpy": "2.4.6"}
  manifest = {"shapes": {}, "versions": versions}
  folder = write_run("a", [log_line(1)], manifest=manifest)
  ((_, written),) = read(folder)[0].rows()["Version"]
  assert written == "palm_mtf 0.1.0, numpy 2.4.6"


def test_every_run_and_every_picture_is_there(folders):
  found, text = read(*folders)
  legend = re.search(r'<ul class="legend">(.*?)</ul>', text, re.DOTALL)[1]
  assert "full" in legend and "bare" in legend
  titles = [title.split(" nats")[0] for title in found.texts("figcaption")]
  assert titles[0] == "Loss"
  for title in ("Learning rate", "Gradient norm", "Speed", "MFU", "Memory"):
    assert any(each.startswith(title) for each in titles), title
  pictures = [a for tag, a, _ in found.elements if a.get("role") == "img"]
  assert len(pictures) == len(titles)
  loss = text[text.index('aria-label="Loss"') :].partition("</svg>")[0]
  assert "var(--run-0)" in loss and "var(--run-1)" in loss


def test_a_row_that_no_run_can_fill_is_left_out_and_one_that_some_can_stays(
  folders,
):
  assert "Parameters" not in read(folders[1])[0].rows()
  text = read(*folders)[1]
  row = re.search(r">Parameters</th>.*?</tr>", text, re.DOTALL)[0]
  assert row.count("<td") == 2 and "&ndash;" in row


def test_the_page_refers_to_nothing_outside_and_runs_nothing(folders):
  found, text = read(*folders)
  assert "http" not in text and "url(" not in re.sub(r"url\(#", "", text)
  assert "@import" not in text
  tags = {tag for tag, _, _ in found.elements}
  assert not tags & {"script", "link", "img", "iframe", "object", "base"}
  for _, attrs, _ in found.elements:
    assert not {"src", "srcset", "action"} & {*attrs}
    assert not [name for name in attrs if name.startswith("on")]
    assert attrs.get("href", "#").startswith("#")


def test_light_and_dark_define_every_color_that_is_used(folders):
  text = read(*folders)[1]
  used = {*re.findall(r"var\((--[\w-]+)\)", text)}
  light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
  for colors in (light, dark):
    assert used <= {*re.findall(r"(--[\w-]+):", colors)}


def test_ids_are_unique(folders):
  ids = [a["id"] for _, a, _ in read(*folders)[0].elements if "id" in a]
  assert len(ids) == len({*ids}) > 100


def test_what_happened_is_told(folders):
  (item,) = (x for x in read(folders[0])[0].texts("li"))
  assert item == "full step 10: rewind to step 5, skipped 5 to 2,004"


def test_samples_are_in_the_order_of_time_and_text_is_text(folders):
  found, text = read(*folders)
  assert found.texts("pre") == ["a < b & 10", "a < b & 2000"]
  assert "full step 2,000" in [x.strip() for x in found.texts("p")]
  assert "<b>" in found.rows()["X"][0][1] and '"&lt;b&gt;' not in text


def test_settings_that_differ_are_apart(folders):
  text = read(*folders)[1]
  differ = text[text.index("Settings that differ") : text.index("<details>")]
  assert "SEED" in differ and "LEARNING_RATE" not in differ
  assert "LEARNING_RATE" in text[text.index("<details>") :]
  assert "Settings that differ" not in read(folders[0])[1]


def test_the_same_runs_give_the_same_bytes(folders):
  assert read(*folders)[1] == read(*folders)[1]
