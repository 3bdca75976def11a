# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs that learn targets from inputs are trained, evaluated and exported."""

import json

import numpy as np
import pytest

from palm_mtf.cli.main import main
from tests import oracle, runs
from tests.cases import slow
from tests.mtf_testing import small_config

SETTINGS = {
  # The second layer reads what the first layer computes from inputs.
  "NUM_LAYERS": 2,
  "PACKING": "packed",
  "EXTRA_IDS": 20,
  "TRAIN_STEPS": 4,
  "EVAL_STEPS": 4,
  "PROMPTS": [],
}


def config_of(objective):
  sizes = {
    name.lower(): runs.SETTINGS[name]
    for name in ("D_MODEL", "NUM_HEADS", "D_KV", "D_FF")
  }
  return small_config(
    **sizes,
    num_layers=2,
    vocab_size=320,
    sequence_length=32,
    objective=objective,
  )


@pytest.fixture(
  scope="module",
  params=["prefix_lm", slow("span_corruption")],
)
def trained(request, corpus, tmp_path_factory):
  """Returns an objective, and a run of two pods."""
  model_dir = tmp_path_factory.mktemp(request.param) / "run"
  macros = {**SETTINGS, "OBJECTIVE": request.param, "NUM_PODS": 2}
  assert runs.run("train", corpus, model_dir, **macros) == 0
  return request.param, model_dir


def validation_batches(model_dir):
  from palm_mtf.cli import gin_files
  from palm_mtf.data.batches.corpus import corpus_of_run
  from palm_mtf.data.vocabulary.load import load_vocabulary

  files = [str(model_dir / "config.gin")]
  _, config = gin_files.load("train", files, []).build()
  vocabulary = load_vocabulary(str(model_dir), config.data, vocab_size=320)
  corpus = corpus_of_run(str(model_dir), config, vocabulary)
  return list(corpus.validation_batches(batch_size=4, num_rows=8))


def test_the_validation_loss_is_the_oracle_s(trained):
  objective, model_dir = trained
  params = runs.read_tensors(model_dir, 4)
  config = config_of(objective)
  params = {x: params[x] for x in oracle.parameter_shapes(config)}
  losses, weights = [], []
  for batch in validation_batches(model_dir):
    loss, _ = oracle.loss(config, params, **batch, z_loss=0.0)
    losses.append(loss)
    weights.append(batch["loss_weights"].sum())
  expected = np.average(losses, weights=weights)
  found = runs.read_metrics(model_dir)[-1]["validation_loss"]
  assert found == pytest.approx(expected, rel=1e-5)
  causal, _ = oracle.loss(
    config, params, **{**batch, "prefix": None}, z_loss=0.0
  )
  assert abs(causal - loss) > 1e-3  # attention within the prefix matters


def test_evaluate_says_the_loss_of_training_again(trained, capsys):
  objective, model_dir = trained
  given = [f"--gin_file={model_dir}/config.gin", "--json"]
  assert main(["evaluate", *given]) == 0
  found = json.loads(capsys.readouterr().out)
  trained_loss = runs.read_metrics(model_dir)[-1]["validation_loss"]
  assert found["validation_loss"] == pytest.approx(trained_loss, rel=1e-5)
  # With span corruption, targets are not text, so they have no bytes.
  assert ("bits_per_byte" in found) == (objective == "prefix_lm")


def test_an_exchange_format_of_causal_models_is_refused(
  trained, tmp_path, capsys
):
  objective, model_dir = trained
  for name in ("hf", "gguf"):
    given = [f"--model_dir={model_dir}", f"--format={name}"]
    output = tmp_path / "exported"
    assert main(["export", *given, f"--output={output}"]) == 2
    error = capsys.readouterr().err
    assert f"OBJECTIVE = {objective!r}" in error
    assert "--format=saved_model" in error
    assert not output.exists()
