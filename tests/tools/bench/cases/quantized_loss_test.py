# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Quantized weights cost a trained model little of its perplexity."""

import json

import pytest

from tests import runs
from tools.bench.cases import quantized_loss


@pytest.mark.slow
def test_int8_costs_a_percent_of_perplexity_at_most_and_int4_five(
  tmp_path, capsys
):
  corpus = runs.write_corpus(tmp_path / "corpus")
  model_dir = tmp_path / "run"
  macros = {"TRAIN_STEPS": 100, "LOG_STEPS": 50, "EVAL_STEPS": 100}
  macros |= {"CHECKPOINT_STEPS": 100, "PROMPTS": []}
  assert runs.run("train", corpus, model_dir, **macros) == 0
  capsys.readouterr()
  assert runs.run("evaluate", corpus, model_dir, **macros) == 0
  evaluated = runs.read_metrics(model_dir)[-1]["validation_loss"]
  result = quantized_loss.measure_run(str(model_dir))
  json.dumps(result)
  loss = result["activation"]["loss"]
  assert loss == pytest.approx(evaluated, rel=1e-5)
  assert loss < 3  # the model has learned; an untrained model has 5.8
  for weight_dtype, most in (("int8", 0.01), ("int4", 0.05)):
    assert result[weight_dtype]["loss"] != loss
    ratio = result[weight_dtype]["perplexity_ratio"]
    assert ratio == pytest.approx(1, abs=most)
