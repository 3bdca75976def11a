# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The scaling law of Hoffmann et al. (2022): loss of parameters and tokens.

  L(N, D) = E + A / N^alpha + B / D^beta            equation 2

N are parameters without norm scales, D training tokens, L nats a token. The fit
is their approach 3: the Huber loss, with delta = 1e-3, of the difference of
logarithms. Its uncertainty comes from bootstrap.py.
"""

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
from scipy.optimize import least_squares, nnls

_HUBER_DELTA = 1e-3
_EXPONENTS = (0.1, 0.2, 0.4, 0.7, 1.1)  # from which the fit starts
_MOST = 5.0  # of an exponent
_NUM_STARTS = 3  # the best, of all pairs of these exponents
_SMALLEST = 1e-9  # of E and of each term where N and D are typical, nats


@dataclasses.dataclass(frozen=True)
class Law:
  """Coefficients of equation 2, in its order."""

  e: float
  a: float
  alpha: float
  b: float
  beta: float

  def loss(self, parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns L(N, D), nats a token, of arrays or numbers."""
    of_size = self.a * np.power(parameters, -self.alpha)
    return self.e + of_size + self.b * np.power(tokens, -self.beta)


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs of a training token by size, scale * N ** power.

  Hoffmann et al. have 6 N; attention makes small models dearer.
  """

  scale: float = 6.0
  power: float = 1.0

  @classmethod
  def fitted(
    cls, parameters: Sequence[float], flops: Sequence[float]
  ) -> "Cost":
    """Returns the cost of models, by least squares of logarithms.

    Args:
      parameters: sizes of models, two of them different.
      flops: FLOPs of a training token of each.
    """
    power, log_scale = np.polyfit(np.log(parameters), np.log(flops), 1)
    return cls(float(np.exp(log_scale)), float(power))

  def optimum(self, law: Law, flops: float) -> tuple[float, float]:
    """Returns the parameters and tokens of the lowest loss for training FLOPs.

    It is equation 4 where the cost is 6 N.
    """
    # The derivative of L(N, C / (scale N^power)) by N is 0.
    ratio = law.alpha * law.a / (self.power * law.beta * law.b)
    exponent = 1 / (law.alpha + self.power * law.beta)
    parameters = (ratio * (flops / self.scale) ** law.beta) ** exponent
    return parameters, flops / (self.scale * parameters**self.power)

  def power_of_size(self, law: Law) -> float:
    """Returns a of N_opt ~ C^a."""
    return law.beta / (law.alpha + self.power * law.beta)


def fit(
  parameters: np.ndarray,
  tokens: np.ndarray,
  losses: np.ndarray,
  start: Law | None = None,
) -> Law:
  """Returns the law of runs.

  Args:
    parameters: [runs], sizes of the models.
    tokens: [runs], training tokens.
    losses: [runs], validation losses, nats a token.
    start: law near the one to find; None to look for one.
  """
  # Relative to their means A and B are of the size of the losses.
  size, length = (np.exp(np.mean(np.log(x))) for x in (parameters, tokens))
  sizes, lengths = parameters / size, tokens / length

  def residuals(theta: np.ndarray) -> np.ndarray:
    return np.log(_terms(theta, sizes, lengths).sum(axis=0)) - np.log(losses)

  def jacobian(theta: np.ndarray) -> np.ndarray:
    terms = _terms(theta, sizes, lengths)
    _, of_size, of_length = shares = terms / terms.sum(axis=0)
    _, _, _, alpha, beta = np.exp(theta)
    of_alpha = -alpha * np.log(sizes) * of_size
    of_beta = -beta * np.log(lengths) * of_length
    return np.stack([*shares, of_alpha, of_beta], axis=1)

  if start:
    terms = [start.a * size**-start.alpha, start.b * length**-start.beta]
    starts = [_theta([start.e, *terms], start.alpha, start.beta)]
  else:
    starts = _starts(sizes, lengths, losses)
    starts.sort(key=lambda theta: np.sum(np.abs(residuals(theta))))
  low, high = np.log(_SMALLEST), np.log(_MOST)
  bounds = ([low] * 5, [np.inf, np.inf, np.inf, high, high])
  found = [
    least_squares(
      residuals,
      theta,
      jacobian,
      bounds,
      loss="huber",
      f_scale=_HUBER_DELTA,
    )
    for theta in starts[:_NUM_STARTS]
  ]
  best = min(found, key=lambda x: x.cost).x
  e, a, b, alpha, beta = np.exp(best)
  return Law(*map(float, (e, a * size**alpha, alpha, b * length**beta, beta)))


def _terms(
  theta: np.ndarray, sizes: np.ndarray, lengths: np.ndarray
) -> np.ndarray:
  """Returns the three terms of the loss, [3, runs]."""
  e, a, b, alpha, beta = np.exp(theta)
  return np.stack([e * sizes**0, a * sizes**-alpha, b * lengths**-beta])


def _theta(terms: Sequence[float], alpha: float, beta: float) -> np.ndarray:
  """Returns the logarithms of E, A, B, alpha and beta, which are positive."""
  return np.log(np.maximum([*terms, alpha, beta], 2 * _SMALLEST))


def _starts(
  sizes: np.ndarray, lengths: np.ndarray, losses: np.ndarray
) -> list[np.ndarray]:
  """Returns the best E, A and B for each pair of exponents."""
  starts = []
  # Given the exponents, the loss is linear in the rest.
  for alpha, beta in itertools.product(_EXPONENTS, repeat=2):
    terms = np.stack([sizes**0, sizes**-alpha, lengths**-beta], axis=1)
    best, _ = nnls(terms / losses[:, None], np.ones(len(losses)))
    starts.append(_theta(best, alpha, beta))
  return starts
