# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Passages are ranked by BM25, and follow their files."""

import json
import math
import os
import re

import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.retrieval.passages import Passages
from tests.refusals import message_of

TEXTS = [
  "The river Elbe begins in the mountains.",
  "Stone bridges cross the river in the old town.",
  "A cat sleeps on the warm stone.",
  "Bread is baked before the sun rises.",
]


def settings(path, retrieve=2, **changes):
  return DecodeConfig(retrieve=retrieve, passages=[str(path)], **changes)


def write(path, texts=TEXTS):
  lines = "".join(json.dumps({"text": x}) + "\n" for x in texts)
  # Another file, so that the change is seen even within a tick of the clock.
  (path.parent / "new").write_text(lines)
  os.replace(path.parent / "new", path)
  return path


@pytest.fixture
def path(tmp_path):
  return write(tmp_path / "passages.jsonl")


def anything(text):
  return True


def rank(texts, query):
  """Returns the order of Lucene's BM25, with k1 1.5 and b 0.75."""
  split = [re.findall(r"\w+", x.lower()) for x in texts]
  mean = sum(map(len, split)) / len(split)

  def score(words):
    total = 0.0
    for word in re.findall(r"\w+", query.lower()):
      found = sum(word in x for x in split)
      idf = math.log(1 + (len(split) - found + 0.5) / (found + 0.5))
      f = words.count(word)
      total += idf * f / (f + 1.5 * (0.25 + 0.75 * len(words) / mean))
    return total

  scores = [score(x) for x in split]
  order = sorted(range(len(texts)), key=lambda i: -scores[i])
  return [texts[i] for i in order if scores[i] > 0]


def test_the_best_passages_by_bm25_come_before_the_prompt(path):
  pytest.importorskip("bm25s")
  passages = Passages(settings(path))
  for query in ("Where does the river Elbe begin?", "stone cat", "bread"):
    *found, prompt = passages.put_before(query, anything).split("\n\n")
    assert (found, prompt) == (rank(TEXTS, query)[:2], query)
  # Nothing is put before a prompt that shares no word with a passage.
  for query in ("zebra", "?!", ""):
    assert passages.put_before(query, anything) == query


def test_the_template_is_filled_in_one_pass_and_cut_to_fit(path):
  pytest.importorskip("bm25s")
  write(path, ["the {prompt} {passages}", "the end"])
  template = "<{passages}> Q: {prompt}"
  passages = Passages(settings(path, passage_template=template))
  both = "<the end\n\nthe {prompt} {passages}> Q: the {passages} end"
  asked = "the {passages} end"
  assert passages.put_before(asked, anything) == both
  assert passages.put_before(asked, lambda x: len(x) < 40) == (
    "<the end> Q: the {passages} end"
  )
  assert passages.put_before(asked, lambda x: len(x) < 30) == (
    "<the> Q: the {passages} end"
  )
  assert passages.put_before(asked, lambda x: False) == asked


def test_a_changed_file_replaces_the_passages_and_a_damaged_one_does_not(
  path, caplog
):
  pytest.importorskip("bm25s")
  passages = Passages(settings(path, retrieve=1))
  before = passages.put_before("bread", anything)
  path.write_text("no json\n")
  assert passages.put_before("bread", anything) == before
  assert "the earlier passages stay: PASSAGES: " in caplog.text
  path.unlink()
  assert passages.put_before("bread", anything) == before
  write(path, ["Bread is sold out."])
  assert passages.put_before("bread", anything) == "Bread is sold out.\n\nbread"


def test_a_text_is_cut_into_passages_of_100_words(tmp_path):
  pytest.importorskip("bm25s")
  words = [f"w{i}" for i in range(250)]
  (tmp_path / "a.txt").write_text("\n".join(words))
  passages = Passages(settings(tmp_path / "a.txt", retrieve=1))
  found = passages.put_before("w130", anything)
  assert found == "\n".join(words[100:200]) + "\n\nw130"


def test_wrong_passages_are_one_line(path, monkeypatch):
  for changes, message in (
    ({"passages": ()}, "RETRIEVE = 2 and PASSAGES = []: give files"),
    ({"passage_template": "{prompt}"}, "PASSAGE_TEMPLATE = '{prompt}': give"),
    ({"passage_template": 3}, "PASSAGE_TEMPLATE = 3: give a text"),
    ({"retrieve": -1}, "RETRIEVE = -1: give a whole number"),
    ({"passages": "a.txt"}, "PASSAGES = 'a.txt': give a list of files"),
  ):
    given = {"retrieve": 2, "passages": ("a.txt",), **changes}
    assert message_of(DecodeConfig, **given).startswith(message)
  monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
  assert message_of(Passages, settings(path)) == (
    "RETRIEVE: needs bm25s, which is not installed: pip install "
    "'palm_mtf[retrieval]'."
  )
  monkeypatch.undo()
  pytest.importorskip("bm25s")
  assert message_of(Passages, settings(path, retrieve=5)) == (
    "RETRIEVE = 5: PASSAGES have only 4 with words; give at most as many."
  )
  write(path, ["?!", "", "\n"])
  assert "PASSAGES have only 0 with words" in message_of(
    Passages, settings(path)
  )
  missing = settings(path.parent / "missing.txt")
  assert message_of(Passages, missing).startswith("PASSAGES: ")
  path.write_text('{"prompt": "a"}\n')
  assert message_of(Passages, settings(path)).endswith('write {"text": "..."}.')
