# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Intervals of a law cover what its losses were made of."""

import numpy as np
import pytest

from palm_mtf.sweep.bootstrap import resample
from palm_mtf.sweep.scaling_law import Cost
from tests.sweep.laws import CHINCHILLA, chinchilla_loss, runs

NEW = (2e10, 4e11)  # four times as large as any run, four times as long


def test_intervals_have_the_law_and_a_run_that_it_was_not_fitted_to():
  # The draw of an ordinary experiment; how often is the slow test's to say.
  found = resample(*runs(noise=0.003, seed=0))
  for name, value in vars(CHINCHILLA).items():
    interval = found.interval(lambda law, name=name: getattr(law, name))
    assert interval.low <= value <= interval.high, name
    assert interval.low <= interval.value <= interval.high, name
  value, low, high = found.prediction(*NEW)
  assert low <= chinchilla_loss(*NEW) <= high
  assert value == pytest.approx(chinchilla_loss(*NEW), rel=0.02)


def test_intervals_of_losses_without_noise_are_points():
  value, low, high = resample(*runs()).interval(lambda law: law.alpha)
  assert (low, high) == pytest.approx((value, value), rel=1e-3)
  assert value == pytest.approx(0.34, rel=1e-3)


@pytest.mark.slow
def test_intervals_cover_as_often_as_they_say():
  """95%: of 30 experiments fewer than 25 do so three times in 1,000."""
  numbers = {
    "alpha": lambda law: law.alpha,
    "beta": lambda law: law.beta,
    "E": lambda law: law.e,
    "a": Cost().power_of_size,
  }
  covered = dict.fromkeys([*numbers, "run"], 0)
  for seed in range(30):
    found = resample(*runs(noise=0.003, seed=seed))
    for name, number in numbers.items():
      interval = found.interval(number)
      covered[name] += interval.low <= number(CHINCHILLA) <= interval.high
    noise = np.random.default_rng([seed, 1]).normal(0, 0.003)
    _, low, high = found.prediction(*NEW)
    covered["run"] += low <= chinchilla_loss(*NEW) * np.exp(noise) <= high
  assert min(covered.values()) >= 25, covered
