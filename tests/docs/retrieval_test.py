# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from palm_mtf.cli.main import main
from tests import runs
from tests.commands.index_test import TEXT
from tests.doc_pages import Page

PAGE = Page("docs/retrieval.md")


@pytest.mark.slow
@PAGE.shows("palm_mtf index build")
def test_an_index_is_built_tuned_and_used(block, quickstart, tmp_path, capsys):
  (tmp_path / "learned.jsonl").write_text(json.dumps({"text": TEXT * 30}))
  (tmp_path / "other.txt").write_text("nine one seven")
  (tmp_path / "third.txt").write_text("seven two ten four")
  for words in block.commands:
    few = [] if words[2] == "build" else ["--gin.KNN_NEIGHBOURS=100"]
    assert main([*words[1:], *few]) == 0, words
  assert "knn_perplexity" in capsys.readouterr().out


@pytest.mark.slow
@PAGE.shows("palm_mtf generate")
def test_passages_are_put_before_the_prompt(
  block, quickstart, tmp_path, capsys
):
  pytest.importorskip("bm25s", reason="bm25s is not installed")
  texts = ["def main(one)", "two main", "def three", "four"]
  lines = [json.dumps({"text": x}) + "\n" for x in texts]
  (tmp_path / "learned.jsonl").write_text("".join(lines))
  (words,) = block.commands
  assert main(words[1:]) == 0
  assert "def main(" in capsys.readouterr().out


@pytest.mark.slow
@PAGE.shows("palm_mtf index chunks")
def test_a_model_with_neighbours_is_trained_and_used(
  block, tmp_path, monkeypatch, capsys
):
  monkeypatch.chdir(tmp_path)
  corpus = runs.write_corpus(tmp_path / "corpus")
  (tmp_path / "third.txt").write_text("seven two ten four")
  few = [f"--gin.TEXT_FILES='{corpus}/*.txt'", "--gin.VOCAB_SIZE=320"]
  few += ["--gin.TRAIN_STEPS=2", "--gin.EVAL_BATCHES=1"]
  few += ["--gin.VALIDATION_SHARE=0.4", "--gin.EVAL_STEPS=2"]
  for words in block.commands:
    more = few if "train" in words or "chunks" in words else []
    assert main([*words[1:], *more]) == 0, words
  assert "validation_loss" in capsys.readouterr().out


def test_every_block_is_tested():
  PAGE.assert_every_block_is_tested()
