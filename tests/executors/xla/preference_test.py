# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Pairs of answers train the same numbers wherever steps run."""

import functools

import numpy as np
import pytest

from palm_mtf.generation.inference.sessions import mean_losses
from tests import oracle
from tests.cases import slow
from tests.executors.xla.frozen_test import MESHES
from tests.executors.xla.program_run import run_of, train_on
from tests.model.preference_test import BETA, LOSS, log_ratios, random_pairs
from tests.mtf_testing import relative_error, small_config


def run_steps(mesh, num_pods=1):
  config = small_config(num_layers=2)
  how = {"rows": random_pairs, "loss": LOSS, "num_steps": 3}
  how["params"] = oracle.random_parameters(config, seed=7)
  return train_on(MESHES[mesh], num_pods, config, **how)


on_one_host = functools.cache(functools.partial(run_steps, "hosts"))


@pytest.mark.parametrize(
  ("mesh", "num_pods"), [slow(x, y) for x in MESHES for y in (1, 2)]
)
def test_layouts_pods_and_stages_train_the_same(mesh, num_pods):
  """A pair is in one row, which no layout splits."""
  expected, numbers = on_one_host()
  found, metrics = run_steps(mesh, num_pods)
  for name, value in found.items():
    assert relative_error(value, expected[name]) < 1e-3, name
  for one, other in zip(numbers, metrics, strict=True):
    for name in ("loss", "z_loss", "rewards/margins", "rewards/accuracies"):
      assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-6), name
    assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-4)


@pytest.mark.parametrize(
  ("mesh", "num_pods"), [slow(x, y) for x in MESHES for y in (1, 2)]
)
def test_validation_has_the_margins_and_the_accuracy_of_an_oracle(
  mesh, num_pods
):
  config = small_config(num_layers=2)
  batch = random_pairs(config, batch_size=8, seed=3)
  given = {"num_pods": num_pods, "features": [*batch], "loss": LOSS}
  with run_of(config, MESHES[mesh], **given) as run:
    found = mean_losses(run.step.losses, [batch])
    ratios = log_ratios(config, run.variables(), batch)
  margins = BETA * (ratios - batch["reference"])
  is_right = margins > 0
  assert 0 < is_right.mean() < 1
  expected = np.log1p(np.exp(-margins)), margins, is_right
  for one, other in zip(found, expected, strict=True):
    assert one == pytest.approx(other.mean(), rel=1e-4, abs=1e-5)
