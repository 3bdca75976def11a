# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The zeros of pruned kernels are those of float64 oracles of the papers."""

import functools

import numpy as np
import pytest

from palm_mtf.compression.zeros import set_zeros

OUTPUTS, INPUTS, TOKENS = 12, 140, 400  # more inputs than a block of SparseGPT
SPARSITIES = [0.5, 0.3, 0.75, "2:4"]


def make_case():
  """Returns w, [outputs, inputs] float32, and correlated X, [tokens, inputs].

  Input 7 is always 0.
  """
  rng = np.random.default_rng(0)
  mixing = rng.standard_normal([INPUTS, INPUTS]) / 8 + np.eye(INPUTS)
  x = rng.standard_normal([TOKENS, INPUTS]) @ mixing
  x *= np.exp(rng.standard_normal(INPUTS))
  x[:, 7] = 0.0
  return rng.standard_normal([OUTPUTS, INPUTS]).astype(np.float32), x


def smallest(scores, sparsity, size):
  """Returns which scores are smallest among each `size` that follow another."""
  if sparsity == "2:4":
    size, sparsity = 4, 0.5
  zeros = np.zeros(scores.size, bool)
  for begin in range(0, scores.size, size):
    own = scores.ravel()[begin : begin + size]
    for i in np.argsort(own)[: round(sparsity * size)]:
      zeros[begin + i] = True
  return zeros.reshape(scores.shape)


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_magnitude_removes_the_smallest_weights_of_the_matrix(sparsity):
  """As Zhu and Gupta (2017) do; the others keep their bits."""
  w, _ = make_case()
  zeros = smallest(np.abs(w), sparsity, w.size)
  expected = np.where(zeros, 0, w)
  np.testing.assert_array_equal(set_zeros(w, "magnitude", sparsity), expected)


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_wanda_compares_the_weights_of_an_output(sparsity):
  """By |w_ij| |X_j| (Sun et al. 2024, equation 1)."""
  w, x = make_case()
  scores = np.abs(w) * np.linalg.norm(x, axis=0)
  zeros = smallest(scores, sparsity, INPUTS)
  found = set_zeros(w, "wanda", sparsity, np.square(x).sum(0))
  np.testing.assert_array_equal(found, np.where(zeros, 0, w))
  count = INPUTS // 2 if sparsity == "2:4" else round(sparsity * INPUTS)
  assert ((found == 0).sum(1) == count).all()


@functools.cache
def inverses():
  """Returns the inverse of each H_j of `make_case`, dampened by 0.01."""
  _, x = make_case()
  h = x.T @ x
  unused = np.diag(h) == 0
  h[unused, unused] = 1.0
  h += 0.01 * np.mean(np.diag(h)) * np.eye(INPUTS)
  return [np.linalg.inv(h[j:, j:]) for j in range(INPUTS)]


def surgeon(w, x, sparsity):
  """Removes weights as the optimal brain surgeon does, column by column.

  Frantar and Alistarh (2023), equations 3 and 5: the error of removing w_ij is
  w_ij^2 / [H_j^-1]_00, and later weights of the row change by
  -w_ij / [H_j^-1]_00 [H_j^-1]_0. Each H_j is inverted by itself.
  """
  w, inverse = w.astype(np.float64), inverses()
  w[:, ~x.any(0)] = 0.0
  size = 4 if sparsity == "2:4" else 128
  zeros = np.zeros(w.shape, bool)
  for j in range(INPUTS):
    if j % size == 0:
      some = range(j, min(j + size, INPUTS))
      scores = np.array([w[:, i] ** 2 / inverse[i][0, 0] for i in some]).T
      zeros[:, some] = smallest(scores, sparsity, scores.size)
    for i in np.flatnonzero(zeros[:, j]):
      w[i, j:] -= w[i, j] / inverse[j][0, 0] * inverse[j][0]
      w[i, j] = 0.0
  return w


@pytest.mark.parametrize("sparsity", SPARSITIES)
def test_sparsegpt_is_the_optimal_brain_surgeon(sparsity):
  """The same zeros, and the other weights within float32's rounding."""
  w, x = make_case()
  found = set_zeros(w, "sparsegpt", sparsity, x.T @ x)
  expected = surgeon(w, x, sparsity)
  np.testing.assert_array_equal(found == 0, expected == 0)
  np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


def test_products_change_least_with_sparsegpt_and_most_with_magnitudes():
  """The order of errors that both papers report for equal sparsity."""
  w, x = make_case()
  inputs = None, np.square(x).sum(0), x.T @ x
  methods = "magnitude", "wanda", "sparsegpt"
  errors = [
    np.square(x @ (set_zeros(w, method, 0.5, given) - w).T).sum()
    for method, given in zip(methods, inputs, strict=True)
  ]
  assert errors[0] > errors[1] > errors[2]


@pytest.mark.parametrize("method", ["wanda", "sparsegpt"])
def test_without_inputs_the_magnitudes_decide(method):
  """As for an expert that no token chose; no more weights become 0."""
  w, _ = make_case()
  shape = [INPUTS] if method == "wanda" else [INPUTS, INPUTS]
  found = set_zeros(w, method, "2:4", np.zeros(shape))
  np.testing.assert_array_equal(found, set_zeros(w, "magnitude", "2:4"))
