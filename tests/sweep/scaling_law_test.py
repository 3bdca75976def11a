# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The fit finds the law that losses follow, and its optimum is the lowest."""

import itertools

import numpy as np
import pytest
from scipy.optimize import minimize

from palm_mtf.sweep.scaling_law import Cost, Law, fit
from tests.sweep.laws import CHINCHILLA, chinchilla_loss, runs


@pytest.mark.parametrize(
  ("parameters", "tokens", "loss"),
  # By hand: 1.69 + 0.0835 + 0.1632 and 1.69 + 0.0521 + 0.2512.
  [(70e9, 1.4e12, 1.9367), (280e9, 300e9, 1.9933)],
  ids=["Chinchilla", "Gopher"],
)
def test_the_published_law_gives_these_losses(parameters, tokens, loss):
  assert CHINCHILLA.loss(parameters, tokens) == pytest.approx(loss, abs=1e-4)


@pytest.mark.parametrize(
  "law",
  [CHINCHILLA, Law(1.8, 30.0, 0.32, 220.0, 0.39), Law(0.5, 8.0, 0.1, 9e8, 0.9)],
)
def test_the_fit_recovers_the_law_of_losses_without_noise(law):
  parameters, tokens, _ = runs()
  found = fit(parameters, tokens, law.loss(parameters, tokens))
  for name, value in vars(law).items():
    assert getattr(found, name) == pytest.approx(value, rel=1e-3), name


def test_one_run_that_went_wrong_does_not_move_the_law():
  """The Huber loss is linear in it."""
  parameters, tokens, losses = runs()
  losses[7] *= 1.2
  found = fit(parameters, tokens, losses)
  assert found.alpha == pytest.approx(0.34, rel=0.02)
  assert found.beta == pytest.approx(0.28, rel=0.02)


def _published_objective(theta, parameters, tokens, losses):
  """Equation 3 of Hoffmann et al., written from the paper."""
  a, b, e, alpha, beta = theta
  terms = [
    a - alpha * np.log(parameters),
    b - beta * np.log(tokens),
    np.full(len(losses), e),
  ]
  off = np.abs(np.logaddexp.reduce(terms) - np.log(losses))
  delta = 1e-3
  return np.sum(np.where(off <= delta, off**2 / 2, delta * (off - delta / 2)))


def test_the_paper_s_optimizer_finds_no_better_law():
  """By L-BFGS, as in the paper, scaled up to where it does not stop early."""
  data = runs(noise=0.01, seed=3)
  found = fit(*data)
  ours = _published_objective(
    [*np.log([found.a, found.b, found.e]), found.alpha, found.beta], *data
  )
  grid = itertools.product((0, 10), (0, 10), (-1,), (0.5,), (0.5,))
  theirs = min(
    minimize(
      lambda theta: 1e6 * _published_objective(theta, *data),
      start,
      method="L-BFGS-B",
    ).fun
    for start in grid
  )
  assert ours <= 1.001 * theirs / 1e6


@pytest.mark.parametrize("cost", [Cost(), Cost(11.4, 0.964)])
@pytest.mark.parametrize("flops", [1e19, 5.76e23])
def test_the_optimum_is_the_lowest_loss_of_all_sizes_for_these_flops(
  cost, flops
):
  parameters, tokens = cost.optimum(CHINCHILLA, flops)
  assert cost.scale * parameters**cost.power * tokens == pytest.approx(flops)
  sizes = np.geomspace(parameters / 30, parameters * 30, 20_001)
  losses = chinchilla_loss(sizes, flops / (cost.scale * sizes**cost.power))
  assert sizes[np.argmin(losses)] == pytest.approx(parameters, rel=1e-3)


def test_size_and_tokens_grow_with_the_published_powers_of_flops():
  """Table 2: a = 0.46 and b = 0.54, whose coefficients are rounded here."""
  power = Cost().power_of_size(CHINCHILLA)
  assert power == pytest.approx(0.46, abs=0.01)
  small, large = (Cost().optimum(CHINCHILLA, x) for x in (1e20, 1e22))
  assert large[0] / small[0] == pytest.approx(100**power)
  assert large[1] / small[1] == pytest.approx(100 ** (1 - power))


def test_the_cost_of_a_token_is_that_of_its_models():
  sizes = np.array([1e5, 1e6, 1e7])
  cost = Cost.fitted(sizes, 8 * sizes**0.97)
  assert (cost.scale, cost.power) == pytest.approx((8, 0.97))
