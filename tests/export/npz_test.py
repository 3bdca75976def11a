# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The NumPy folder is enough to compute what palm_mtf computes."""

import json
import types

import numpy as np
import pytest
import sentencepiece

from palm_mtf.cli.main import main
from tests import oracle, runs

TEXT = "one two three four"


@pytest.fixture(scope="module")
def folder(finished, tmp_path_factory):
  """The run of `finished`, exported."""
  path = tmp_path_factory.mktemp("exported") / "model"
  flags = ["--model_dir", str(finished), "--format=npz"]
  assert main(["export", *flags, "--output", str(path)]) == 0
  return path


def test_the_oracle_scores_like_score_with_only_the_folder(folder, finished):
  fields = json.loads((folder / "config.json").read_text())
  assert fields["step"] == 12
  sizes = {name.lower(): value for name, value in fields.items()}
  config = types.SimpleNamespace(**sizes)
  processor = sentencepiece.SentencePieceProcessor(
    model_file=str(folder / "vocabulary.model")
  )
  with np.load(folder / "weights.npz") as arrays:
    params = {name: arrays[name].astype(np.float64) for name in arrays}
  ids = processor.Encode(TEXT)
  expected = oracle.log_likelihood(config, params, [], ids, config.start_id)
  (score,) = runs.printed(
    *("score", "--model_dir", finished, "--json", "--text", TEXT)
  )
  assert score["log_likelihood"] == pytest.approx(expected, rel=1e-5)
