# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What is written down is not asked again, if nothing it depends on differs."""

import pytest

pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.evaluation.answers import AnswerJournal
from tests import strict_json

BY = {"checkpoint": "f00d", "SEED": 0}


def journal(folder, **changes):
  return AnswerJournal(str(folder / "eval" / "a.jsonl"), {**BY, **changes})


def test_answers_survive_whatever_ends_the_process(tmp_path):
  with journal(tmp_path) as first:
    first.add("score", 3, -0.1)
    first.add("prediction", 0, ["a\nb", "\u00e9"])
    lines = (tmp_path / "eval" / "a.jsonl").read_bytes()  # not closed yet
  (tmp_path / "eval" / "a.jsonl").write_bytes(lines + b'["score", 4, -1')
  with journal(tmp_path) as again:
    assert again.known("score") == {3: -0.1}
    assert again.known("prediction") == {0: ["a\nb", "\u00e9"]}
    again.add("score", 4, -2.5)
  with journal(tmp_path) as last:
    assert last.known("score") == {3: -0.1, 4: -2.5}


def test_answers_of_another_checkpoint_or_setting_are_forgotten(tmp_path):
  with journal(tmp_path) as first:
    first.add("score", 3, -0.1)
  with journal(tmp_path, SEED=1) as other:
    assert other.known("score") == {}
  with journal(tmp_path) as first:
    assert first.known("score") == {}


def test_a_score_that_is_not_finite_is_json_and_asked_again(tmp_path):
  with journal(tmp_path) as first:
    first.add("score", 0, float("-inf"))
    first.add("score", 1, -1.5)
    assert first.known("score") == {0: float("-inf"), 1: -1.5}
  strict_json.load_lines(tmp_path / "eval" / "a.jsonl")
  with journal(tmp_path) as again:
    assert again.known("score") == {1: -1.5}
