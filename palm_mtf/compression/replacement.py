# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Replaces weights so that products change least: GPTQ and SparseGPT.

Both go through the inputs of a kernel in order. The weights of an input are
replaced, by rounded ones in GPTQ and partly by zeros in SparseGPT; then the
weights of later inputs change so that the error of the product is smallest
(Frantar et al. 2022, equations 2 and 3).
"""

from collections.abc import Callable

import numpy as np

BLOCK = 128  # inputs after which all later weights change at once
_DAMPENING = 0.01
# From the number of an input in its group, and its weights, [outputs].
Replace = Callable[[int, np.ndarray], np.ndarray]


def replace_weights(
  w: np.ndarray,
  products: np.ndarray,
  size: int,
  choose: Callable[[slice, np.ndarray, np.ndarray], Replace],
) -> np.ndarray:
  """Returns the replacements of w, [inputs, outputs] float32.

  H is X^T X plus 0.01 of the mean of its diagonal. The error of replacing w_i
  by r_i is (w_i - r_i)^2 / f_i^2, where f_i^2 is the first number of the
  inverse of H's rows and columns from i on.

  Args:
    products: X^T X of the inputs X of w in a text, [inputs, inputs]; zeros, as
      of an expert that no token chose, change no later weights.
    size: inputs per group, a divisor of BLOCK.
    choose: returns how to replace a group, given its place, its weights as they
      are then, [group, outputs] float64, and f, [group, 1].
  """
  w, h = w.astype(np.float64), products.astype(np.float64)
  h[np.diag_indices(len(h))] += _DAMPENING * np.trace(h) / len(h) or 1.0
  # Row i of this upper factor, times f_i, is the first row of the inverse of
  # H's rows and columns from i on.
  factor = np.linalg.cholesky(np.linalg.inv(h)).T
  f = np.diag(factor)[:, np.newaxis]
  for begin in range(0, len(w), BLOCK):
    end = min(begin + BLOCK, len(w))
    errors = np.empty([end - begin, w.shape[1]])
    for i in range(begin, end):
      if i % size == 0:
        group = slice(i, i + size)
        replace = choose(group, w[group], f[group])
      new = replace(i % size, w[i])
      errors[i - begin] = (w[i] - new) / f[i]
      w[i:end] -= np.outer(factor[i, i:end], errors[i - begin])
      w[i] = new
    w[end:] -= factor[begin:end, end:].T @ errors
  return w.astype(np.float32)
