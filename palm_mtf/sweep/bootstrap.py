# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The uncertainty of a scaling law, by a parametric bootstrap.

Sizes and tokens were chosen and not drawn, so that log L alone is drawn anew,
normal around the law (Efron and Tibshirani 1993, chapter 6.5). Drawing from the
residuals would make intervals too short: the Huber loss leaves as many of them
at 0 as there are coefficients.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.sweep.scaling_law import Law, fit

_NUM_LAWS = 400
_NUM_COEFFICIENTS = 5
_INTERVAL = (2.5, 97.5)  # percentiles


class Interval(NamedTuple):
  """A number, and the bounds of its 95% interval."""

  value: float
  low: float
  high: float


class Resampled(NamedTuple):
  """The law of runs, and those of losses drawn around it."""

  law: Law
  laws: Sequence[Law]
  noise: np.ndarray  # [laws], of log L of one more run

  def interval(self, number) -> Interval:
    """Returns a function of a law, float, with its interval."""
    return _interval(number(self.law), [number(x) for x in self.laws])

  def prediction(self, parameters: float, tokens: float) -> Interval:
    """Returns the loss that one more run would have, nats a token."""
    # A run differs from the law of all of them, too.
    losses = [
      x.loss(parameters, tokens) * np.exp(noise)
      for x, noise in zip(self.laws, self.noise, strict=True)
    ]
    return _interval(self.law.loss(parameters, tokens), losses)


def resample(
  parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray, seed: int = 0
) -> Resampled:
  """Fits the law of runs, and again to losses drawn around it.

  Args:
    parameters: [runs], sizes of the models.
    tokens: [runs], training tokens.
    losses: [runs], validation losses, nats a token.
    seed: seed of the draws.
  """
  law = fit(parameters, tokens, losses)
  fitted = law.loss(parameters, tokens)
  residuals = np.log(losses / fitted)
  rng = np.random.default_rng(seed)
  # Few residuals leave the deviation uncertain, too: Student's distribution.
  freedom = len(losses) - _NUM_COEFFICIENTS
  variance = np.sum(residuals**2) / rng.chisquare(freedom, [_NUM_LAWS, 1])
  drawn = rng.normal(0, np.sqrt(variance), [_NUM_LAWS, len(losses) + 1])
  laws = [
    fit(parameters, tokens, fitted * np.exp(noise), start=law)
    for noise in drawn[:, :-1]
  ]
  return Resampled(law, laws, drawn[:, -1])


def _interval(value: float, drawn: Sequence[float]) -> Interval:
  low, high = np.percentile(drawn, _INTERVAL)
  return Interval(float(value), float(low), float(high))
