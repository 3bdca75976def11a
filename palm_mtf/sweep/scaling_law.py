# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The scaling law of Hoffmann et al. (2022), fitted to the runs of a sweep.

  L(N, D) = E + A / N^alpha + B / D^beta            equation 2

N is the number of parameters without norm scales, D the number of training
tokens, and L the loss in nats per token. The fit is approach 3 of the paper: it
minimizes the Huber loss, with delta = 1e-3, of the difference in log L between
law and run.

Intervals come from a parametric bootstrap (Efron and Tibshirani 1993, chapter
6.5). The user chooses N and D, so only log L is drawn, from a normal
distribution around the law. Drawing from the residuals would make intervals too
short, because the Huber loss makes as many residuals 0 as the law has
coefficients.
"""

import dataclasses
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from scipy.optimize import least_squares, nnls

from palm_mtf.sweep.runs import FINISHED, Row

_HUBER_DELTA = 1e-3
_EXPONENTS = (0.1, 0.2, 0.4, 0.7, 1.1)  # guesses of alpha and of beta
_NUM_STARTS = 3  # number of best pairs of guesses from which the fit starts
_MOST = 5.0  # upper bound of alpha and beta, far above those of real models
_SMALLEST = 1e-9  # lower bound of coefficients, as their logarithms are fitted
_NUM_LAWS = 400  # laws of the bootstrap; 10 of them are below each interval
_INTERVAL = (2.5, 97.5)  # percentiles of these laws, the bounds of intervals
# A fit needs two runs more than the law has coefficients, so that residuals
# show the noise, and at least _MIN_VALUES different values of N and of D.
_MIN_RUNS, _MIN_VALUES = 7, 3


@dataclasses.dataclass(frozen=True)
class Law:
  """Coefficients of the loss L(N, D) = e + a / N^alpha + b / D^beta.

  N is the number of parameters, D the number of training tokens. Coefficients
  are numbers or, for several laws, arrays [laws].
  """

  e: float
  a: float
  alpha: float
  b: float
  beta: float

  def loss(self, parameters: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns L(N, D), nats per token, for numbers or arrays N and D."""
    of_size = self.a * np.power(parameters, -self.alpha)
    return self.e + of_size + self.b * np.power(tokens, -self.beta)


@dataclasses.dataclass(frozen=True)
class Cost:
  """FLOPs per training token of a model of N parameters: scale * N ** power.

  Hoffmann et al. use 6 N. A power below 1 allows for attention in small models.
  """

  scale: float = 6.0
  power: float = 1.0

  @classmethod
  def fitted(
    cls, parameters: Sequence[float], flops: Sequence[float]
  ) -> "Cost":
    """Fits log FLOPs per training token of models; not all sizes are equal."""
    power, log_scale = np.polyfit(np.log(parameters), np.log(flops), 1)
    return cls(float(np.exp(log_scale)), float(power))

  def optimum(self, law: Law, flops: float) -> tuple[float, float]:
    """Returns the parameters and tokens with the lowest loss for these FLOPs.

    With a cost of 6 N this is equation 4 of Hoffmann et al.
    """
    # At the optimum, dL/dN = 0 for D = flops / (scale N^power).
    ratio = law.alpha * law.a / (self.power * law.beta * law.b)
    exponent = 1 / (law.alpha + self.power * law.beta)
    parameters = (ratio * (flops / self.scale) ** law.beta) ** exponent
    return parameters, flops / (self.scale * parameters**self.power)

  def power_of_size(self, law: Law) -> float:
    """Returns x such that the optimal N for C FLOPs is proportional to C^x."""
    return law.beta / (law.alpha + self.power * law.beta)


def fit(
  parameters: np.ndarray,
  tokens: np.ndarray,
  losses: np.ndarray,
  start: Law | None = None,
) -> Law:
  """Fits the law to runs; arrays are [runs], losses are in nats per token.

  `start` is the law from which the fit starts; None tries several starts.
  """
  # Divide N and D by their geometric means. Otherwise A and B would vary with
  # the exponents by orders of magnitude: the fit would be ill-conditioned.
  size, length = (np.exp(np.mean(np.log(x))) for x in (parameters, tokens))
  sizes, lengths = parameters / size, tokens / length

  # theta holds the logarithms of E, A, B, alpha and beta, which are positive.
  def compute_terms(theta: np.ndarray) -> np.ndarray:
    e, a, b, alpha, beta = np.exp(theta)
    return np.stack([e * sizes**0, a * sizes**-alpha, b * lengths**-beta])

  def residuals(theta: np.ndarray) -> np.ndarray:
    return np.log(compute_terms(theta).sum(axis=0)) - np.log(losses)

  def jacobian(theta: np.ndarray) -> np.ndarray:
    terms = compute_terms(theta)
    _, of_size, of_length = shares = terms / terms.sum(axis=0)
    _, _, _, alpha, beta = np.exp(theta)
    of_alpha = -alpha * np.log(sizes) * of_size
    of_beta = -beta * np.log(lengths) * of_length
    return np.stack([*shares, of_alpha, of_beta], axis=1)

  def make_start(terms: Sequence[float], *exponents: float) -> np.ndarray:
    return np.log(np.maximum([*terms, *exponents], 2 * _SMALLEST))

  if start:
    terms = start.e, start.a * size**-start.alpha, start.b * length**-start.beta
    starts = [make_start(terms, start.alpha, start.beta)]
  else:
    starts = []
    # For given exponents, the loss is linear in E, A and B, so non-negative
    # least squares finds these three.
    for alpha, beta in itertools.product(_EXPONENTS, repeat=2):
      terms = np.stack([sizes**0, sizes**-alpha, lengths**-beta], axis=1)
      best, _ = nnls(terms / losses[:, None], np.ones(len(losses)))
      starts.append(make_start(best, alpha, beta))
    starts.sort(key=lambda theta: np.sum(np.abs(residuals(theta))))
  low, high = np.log(_SMALLEST), np.log(_MOST)
  bounds = ([low] * 5, [np.inf, np.inf, np.inf, high, high])
  huber = {"loss": "huber", "f_scale": _HUBER_DELTA}
  found = [
    least_squares(residuals, theta, jacobian, bounds, **huber)
    for theta in starts[:_NUM_STARTS]
  ]
  best = min(found, key=lambda x: x.cost).x
  e, a, b, alpha, beta = np.exp(best)
  return Law(*map(float, (e, a * size**alpha, alpha, b * length**beta, beta)))


class Interval(NamedTuple):
  """A number with the bounds of its 95% interval."""

  value: float
  low: float
  high: float


class Resampled(NamedTuple):
  """The law of the runs and, for intervals, laws fitted to simulated losses."""

  law: Law
  laws: Law  # each coefficient is an array, [laws]
  noise: np.ndarray  # [laws], simulated errors in log L, for `prediction`

  def interval(self, number: Callable[[Law], float]) -> Interval:
    """Returns the value of a function of the law, with its interval."""
    low, high = np.percentile(number(self.laws), _INTERVAL)
    return Interval(float(number(self.law)), float(low), float(high))

  def prediction(self, parameters: float, tokens: float) -> Interval:
    """Returns the predicted loss of one more run, nats per token."""
    # Add noise, because one more run would deviate from the law too.
    losses = self.laws.loss(parameters, tokens) * np.exp(self.noise)
    low, high = np.percentile(losses, _INTERVAL)
    value = self.law.loss(parameters, tokens)
    return Interval(float(value), float(low), float(high))


def resample(
  parameters: np.ndarray, tokens: np.ndarray, losses: np.ndarray
) -> Resampled:
  """Fits the law to runs and, for intervals, to simulated losses; see `fit`."""
  law = fit(parameters, tokens, losses)
  fitted = law.loss(parameters, tokens)
  residuals = np.log(losses / fitted)
  rng = np.random.default_rng(0)
  # Few residuals leave the variance uncertain, so the variance is drawn too;
  # the noise then has Student's t distribution.
  freedom = len(losses) - len(dataclasses.fields(Law))
  variance = np.sum(residuals**2) / rng.chisquare(freedom, [_NUM_LAWS, 1])
  drawn = rng.normal(0, np.sqrt(variance), [_NUM_LAWS, len(losses) + 1])
  laws = [
    dataclasses.astuple(
      fit(parameters, tokens, fitted * np.exp(noise), start=law)
    )
    for noise in drawn[:, :-1]
  ]
  return Resampled(law, Law(*np.transpose(laws)), drawn[:, -1])


def runs_to_fit(rows: Sequence[Row]) -> list[Row]:
  """Returns the run with the lowest loss for each size and number of tokens.

  Runs that are held out, unfinished or without a finite loss do not count.
  """
  best: dict[tuple[int, int], Row] = {}
  for row in rows:
    if _has_result(row) and not row["held_out"]:
      key = row["parameters"], row["tokens"]
      if key not in best or row["loss"] < best[key]["loss"]:
        best[key] = row
  return list(best.values())


def _has_result(row: Row) -> bool:
  return row["outcome"] == FINISHED and row["loss"] is not None


def why_no_law(rows: Sequence[Row]) -> str:
  """Returns why the runs are too few to fit a law; "" if they suffice."""
  runs = runs_to_fit(rows)
  sizes, tokens = (
    len({row[x] for row in runs}) for x in ("parameters", "tokens")
  )
  if min(sizes, tokens) >= _MIN_VALUES and len(runs) >= _MIN_RUNS:
    return ""
  return (
    f"no scaling law: it takes {_MIN_RUNS} finished runs, of {_MIN_VALUES} "
    f"sizes and {_MIN_VALUES} numbers of tokens; there are {len(runs)}, of "
    f"{sizes} and {tokens}"
  )


def law_record(rows: Sequence[Row], budget: float | None) -> dict[str, Any]:
  """Returns the law, its optimum, and its predictions for held-out runs.

  Args:
    rows: a table for which `why_no_law` returns "".
    budget: training FLOPs of the optimum; None for no optimum.

  Returns:
    {name, such as "alpha": value}. A value with an uncertainty is an
    `Interval`. Losses are in nats per token.
  """
  runs = runs_to_fit(rows)
  parameters, tokens, losses, flops, cost_of_token = (
    np.array([row[x] for row in runs], float)
    for x in ("parameters", "tokens", "loss", "flops", "flops_per_token")
  )
  found = resample(parameters, tokens, losses)
  cost = Cost.fitted(parameters, cost_of_token)
  optimum = budget and {
    "flops": budget,
    "times_the_largest_run": budget / flops.max(),
    "parameters": found.interval(lambda law: cost.optimum(law, budget)[0]),
    "tokens": found.interval(lambda law: cost.optimum(law, budget)[1]),
    "loss": found.interval(lambda law: law.loss(*cost.optimum(law, budget))),
  }
  return {
    "num_runs": len(runs),
    **{
      name: found.interval(operator.attrgetter(name.lower()))
      for name in ("E", "A", "alpha", "B", "beta")
    },
    "gamma": found.interval(lambda law: law.alpha * cost.power_of_size(law)),
    "size_power": found.interval(cost.power_of_size),
    "cost": dataclasses.asdict(cost),
    "budget": optimum or None,
    "held_out": [
      {
        "run": row["run"],
        "predicted": found.prediction(row["parameters"], row["tokens"]),
        "measured": row["loss"],
      }
      for row in rows
      if row["held_out"] and _has_result(row)
    ],
  }


def law_text(record: Mapping[str, Any]) -> str:
  """Returns the law, its optimum and predictions (`law_record`) as text."""
  lines = [
    f"scaling law of {record['num_runs']} runs, with 95% intervals",
    "  L(N, D) = E + A / N^alpha + B / D^beta, of N parameters and D tokens",
    "  L(C) = E + K / C^gamma with N ~ C^a, the lowest of C FLOPs",
  ]
  for name in ("E", "A", "alpha", "B", "beta", "gamma"):
    lines.append(_format_line(name, record[name]))
  lines.append(_format_line("a", record["size_power"]))
  if budget := record["budget"]:
    lines.append(
      f"compute-optimal for {budget['flops']:.3g} FLOPs, "
      f"{budget['times_the_largest_run']:.3g} times those of the largest run"
    )
    for name in ("parameters", "tokens", "loss"):
      lines.append(_format_line(name, budget[name]))
  if checks := record["held_out"]:
    width = max(len(x["run"]) for x in checks)
    lines.append("runs that the law was not fitted to, predicted and measured")
    for each in checks:
      value, low, high = each["predicted"]
      lines.append(
        f"  {each['run']:{width}}  {value:.4f}  {low:.4f} to {high:.4f}  "
        f"measured {each['measured']:.4f}, {each['measured'] / value - 1:+.1%}"
      )
  return "\n".join(lines)


def _format_line(name: str, interval: Interval) -> str:
  value, low, high = map(_format_number, interval)
  return f"  {name:10}  {value:>12}  {low} to {high}"


def _format_number(value: float) -> str:
  """Returns a number rounded to three digits: 1,230,000 for 1234567."""
  if 1e3 <= value < 1e15:
    return f"{float(f'{value:.3g}'):,.0f}"
  return f"{value:.3g}"
