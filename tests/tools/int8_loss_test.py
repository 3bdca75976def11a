# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Int8 weights cost a trained model next to nothing of its perplexity."""

import json

import pytest

from tests import runs
from tools import int8_loss


def test_int8_costs_less_than_a_percent_of_perplexity(tmp_path, capsys):
  corpus = runs.write_corpus(tmp_path / "corpus")
  model_dir = tmp_path / "run"
  macros = {"TRAIN_STEPS": 100, "LOG_STEPS": 50, "EVAL_STEPS": 100}
  macros |= {"CHECKPOINT_STEPS": 100, "PROMPTS": []}
  assert runs.run("train", corpus, model_dir, **macros) == 0
  capsys.readouterr()
  assert runs.run("evaluate", corpus, model_dir, **macros) == 0
  evaluated = runs.read_metrics(model_dir)[-1]["validation_loss"]
  result = int8_loss.measure(str(model_dir))
  json.dumps(result)
  assert result["loss"] == pytest.approx(evaluated, rel=1e-5)
  assert result["loss"] < 3  # it has learnt: nothing is 5.8
  assert result["int8_loss"] != result["loss"]
  assert result["perplexity_ratio"] == pytest.approx(1, abs=0.01)
