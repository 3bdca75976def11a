# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attributes in Dolma's form exclude documents."""

import gzip
import json
import math

import pytest

from palm_mtf.config import DataConfig, FilterConfig
from palm_mtf.data.filters.filtered_source import open_filtered
from tests.refusals import message_of

# Documents in the form of Dolma's documentation, with scores of two taggers.
SCORES = {
  "a": ([[0, 9, 0.9]], [[0, 4, 0.1], [4, 9, 0.7]]),
  "b": ([[0, 9, 0.2]], []),
  "c": ([[0, 9, 0.6]], []),
  "d": ([[0, 9, 0.5]], [[0, 9, 0.5]]),
}


def write(path, lines):
  path.parent.mkdir(parents=True, exist_ok=True)
  with gzip.open(path, "wt") as file:
    file.writelines(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def folder(tmp_path):
  names = [*SCORES]
  documents = [{"id": x, "text": f"text {x}", "source": "s"} for x in names]
  write(tmp_path / "documents" / "2020" / "x.jsonl.gz", documents)
  for tool, key, index in (("good", "hq", 0), ("bad", "toxic", 1)):
    lines = [
      {"id": x, "attributes": {key: SCORES[x][index], "other": []}}
      for x in names
    ]
    write(tmp_path / "attributes" / tool / "2020" / "x.jsonl.gz", lines)
  return tmp_path


def open_source(folder, *conditions):
  data = DataConfig(
    text_files=f"{folder}/documents/**/*.gz",
    vocabulary=None,
    validation_share=0.5,
    filters=FilterConfig(attribute_filters=[*conditions]),
  )
  (source,) = open_filtered(str(folder / "run"), data)
  return source


def kept(source):
  return "".join(x.text.removeprefix("text ") for _, x in source.documents())


@pytest.mark.parametrize(
  ("conditions", "expected"),
  [
    ([], "abcd"),
    (["good/hq >= 0.5"], "acd"),
    (["good/hq >= 0.55"], "ac"),
    (["good/hq <= 0.5"], "bd"),
    (["bad/toxic <= 0.5"], "bcd"),  # the highest of two spans; no span is 0
    (["good/hq >= 5e-1", "bad/toxic <= .5"], "cd"),
    (["good/hq >= 0.3", "good/hq <= 0.8"], "cd"),
  ],
)
def test_documents_that_meet_all_conditions_are_kept(
  folder, conditions, expected
):
  source = open_source(folder, *conditions)
  assert kept(source) == expected
  if conditions:
    assert source.counts["removed_by_attributes"] == 4 - len(expected)


def test_other_scores_and_conditions_are_other_documents(folder):
  """Tokens on disk are found by the fingerprint."""
  prints = {open_source(folder).fingerprint()}
  for condition in ("good/hq >= 0.5", "good/hq >= 0.6", "bad/toxic <= 0.5"):
    prints.add(open_source(folder, condition).fingerprint())
  path = folder / "attributes" / "good" / "2020" / "x.jsonl.gz"
  write(path, [{"id": x, "attributes": {"hq": []}} for x in SCORES])
  prints.add(open_source(folder, "good/hq >= 0.5").fingerprint())
  assert len(prints) == 5


def attributes(**scores):
  return [{"id": x, "attributes": {"hq": y}} for x, y in scores.items()]


@pytest.mark.parametrize(
  ("lines", "message"),
  [
    (
      attributes(a=[], c=[], b=[], d=[]),
      'has the id "b", and the attributes of good the id "c"; give both in',
    ),
    (attributes(a=[], b=[]), 'has the id "c", and the attributes of good the'),
    (
      [{"id": "a", "attributes": {"hq2": []}}],
      "'hq' (did you mean \"hq2\"?); g",
    ),
    ([{"attributes": {"hq": []}}], 'has the id "a", and the attributes of g'),
    ([{"id": "a"}], "line 1 has no attribute 'hq'; give {"),
    (attributes(a=[[0, 1]]), "line 1: 'hq' is [[0, 1]]; give {"),
    # A number is compared, but NaN is neither above nor below a limit.
    *(
      (
        attributes(a=[[0, 1, 0.9], [0, 1, x]]),
        f"'hq' is [[0, 1, 0.9], [0, 1, {y}",
      )
      for x, y in (
        ("0.9", '"0.9"'),
        (True, "true"),
        (math.nan, "NaN"),
        (math.inf, "Infinity"),
      )
    ),
    (attributes(a=["123"]), "'hq' is [\"123\"]; give {"),
    (attributes(a={"123": 1}), "'hq' is {\"123\": 1}; give {"),
    ([{"id": "a", "attributes": 5}], "line 1 has no attribute 'hq'; give {"),
    ([{"id": "a", "attributes": [1]}], "line 1 has no attribute 'hq'; give {"),
    (
      attributes(a=[], b=[], c=[], d=[[0, 1, 10**400]], e=[]),
      "after its last line, has the id null, and the attributes of good the "
      'id "e"; give both in',
    ),
  ],
)
def test_attributes_that_do_not_fit_are_one_line(folder, lines, message):
  path = folder / "attributes" / "good" / "2020" / "x.jsonl.gz"
  write(path, lines)
  source = open_source(folder, "good/hq >= 0.5")
  assert message in message_of(kept, source)


def test_missing_attributes_and_wrong_conditions_are_one_line(folder):
  source = open_source(folder, "none/hq >= 0.5")
  assert "attributes/none/2020/x.jsonl.gz" in message_of(source.fingerprint)
  write(folder / "elsewhere" / "x.jsonl.gz", [{"id": "a", "text": "b"}])
  data = DataConfig(
    text_files=f"{folder}/elsewhere/*",
    vocabulary=None,
    validation_share=0.5,
    filters=FilterConfig(attribute_filters=["good/hq >= 0.5"]),
  )
  (source,) = open_filtered(str(folder / "run"), data)
  assert "is in no folder named documents" in message_of(source.fingerprint)
  for wrong in (
    "hq >= 0.5",
    "good/hq > 0.5",
    "good/hq >= x",
    "good/hq >= 1.2.3",
  ):
    source = open_source(folder, wrong)
    assert "give conditions such as" in message_of(source.fingerprint)
