# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The calibration error of examples/distillation is that of the paper."""

import importlib.util

import numpy as np
import pytest

from tests import oracle, runs
from tests.model.distillation_test import log_softmax
from tests.source_files import ROOT
from tests.training.reference_test import model_config
from tests.training.teacher_test import read_corpus

PATH = ROOT / "examples" / "distillation" / "calibration_error.py"


@pytest.fixture(scope="module")
def made():
  spec = importlib.util.spec_from_file_location("made", PATH)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def expected_error(probabilities, is_right, weights):
  """Guo et al. 2017, equation 3, bin by bin."""
  total = 0.0
  for i in range(15):
    low, high = i / 15, (i + 1) / 15
    own = (probabilities >= low) & (
      (probabilities < high) | ((i == 14) & (probabilities == 1))
    )
    if own.any():
      accuracy = np.average(is_right[own], weights=weights[own])
      confidence = np.average(probabilities[own], weights=weights[own])
      total += weights[own].sum() * abs(accuracy - confidence)
  return total / weights.sum()


def test_the_error_is_the_mean_gap_of_15_bins(made):
  """Half of the tokens are said to be certain, and half of these are right."""
  assert made.calibration_error(
    np.array([1.0, 1.0, 0.5, 0.5]), np.array([1, 0, 1, 0]), np.ones(4)
  ) == pytest.approx(0.25)
  rng = np.random.default_rng(0)
  given = rng.random(999), rng.random(999) < 0.4, 0.1 + rng.random(999)
  expected = expected_error(*given)
  assert made.calibration_error(*given) == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_a_run_has_the_error_of_an_oracle(made, tmp_path):
  texts = runs.write_corpus(tmp_path / "texts")
  assert runs.run("train", texts, tmp_path / "run", PROMPTS=[]) == 0
  loss, error = made.measure(str(tmp_path / "run"))
  params, config = runs.read_tensors(tmp_path / "run", 12), model_config()
  batches = read_corpus(tmp_path / "run").validation_batches(
    batch_size=4, num_rows=8
  )
  rows = {x: [] for x in ("inputs", "targets")}
  for batch in batches:
    for name, found in rows.items():
      found.append(batch[name])
  inputs, targets = map(np.concatenate, rows.values())
  log_p = log_softmax(oracle.forward(config, params, inputs))
  of_targets = np.take_along_axis(log_p, targets[..., np.newaxis], -1)
  assert loss == pytest.approx(-of_targets.mean(), rel=1e-4)
  expected = expected_error(
    np.exp(log_p.max(-1)).ravel(),
    (log_p.argmax(-1) == targets).ravel(),
    np.ones(targets.size),
  )
  assert error == pytest.approx(expected, abs=1e-4)
