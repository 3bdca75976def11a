# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs of a model that attends to neighbours."""

import json

import pytest

from tests import runs

MACROS = {
  "NUM_LAYERS": 2,
  "LAYERS": "plain, reading",
  "VARIANTS": {"plain": {}, "reading": {"NEIGHBOURS": 2}},
  "CHUNK_LENGTH": 8,
  "PROMPTS": [],
  "TRAIN_STEPS": 6,
  "CHECKPOINT_STEPS": 3,
}


@pytest.mark.slow
def test_a_run_with_neighbours_resumes_with_the_same_bits_and_scores_texts(
  tmp_path, palm_mtf
):
  corpus = runs.write_corpus(tmp_path / "corpus")
  macros = MACROS | {
    "NEIGHBOUR_INDEX": str(tmp_path / "chunks"),
    "CACHE_DIR": str(tmp_path / "tokens"),
  }
  one, other = tmp_path / "one", tmp_path / "other"
  assert runs.run("index chunks", corpus, one, **macros) == 0
  macros["VOCABULARY"] = str(one / "vocabulary.model")
  assert runs.run("train", corpus, one, **macros) == 0
  assert runs.run("train", corpus, other, **macros | {"TRAIN_STEPS": 3}) == 0
  assert runs.run("train", corpus, other, **macros) == 0
  runs.assert_same_tensors(one, other, 6)

  given = "--model_dir", one, "--json"
  (evaluated,) = runs.printed("evaluate", *given)
  # A document that fills one row, which is predicted as in training.
  (tmp_path / "text.txt").write_text(" ".join(runs.WORDS[:6]))
  scored, *_ = runs.printed("score", *given, "--input", tmp_path / "text.txt")
  assert 0 < evaluated["validation_loss"] < 7
  assert scored["log_likelihood"] < 0

  for command in (
    ["generate", "--prompt", "one"],
    ["serve"],
    ["export", "--output", str(tmp_path / "e")],
    ["export", "--format", "gguf", "--output", str(tmp_path / "e")],
  ):
    code, _, err = palm_mtf(*command, "--model_dir", one)
    assert code == 2
    assert "finds no neighbours of a text" in err.splitlines()[-1]

  # Another index than the run began with.
  again = macros | {"NEIGHBOUR_INDEX": str(tmp_path / "others")}
  few = again | {"TEXT_FILES": f"{corpus}/1*.txt"}
  assert runs.run("index chunks", corpus, tmp_path / "third", **few) == 0
  code, _, err = palm_mtf(
    *runs.arguments("train", corpus, one, **again | {"TRAIN_STEPS": 8})
  )
  assert code == 2
  assert "the run began with" in err
  manifest = json.loads((tmp_path / "others" / "manifest.json").read_text())
  assert manifest["chunk_length"] == 8
