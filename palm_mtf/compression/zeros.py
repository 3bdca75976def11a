# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sets weights of a kernel to zero, by magnitude, Wanda or SparseGPT.

A kernel is a matrix w, [outputs, inputs]. X, [tokens, inputs], are the inputs
of its products in a text. The weights with the smallest scores become 0:

  magnitude  |w_ij|                   compared in the whole matrix
  wanda      |w_ij| |X_j|             in row i (Sun et al. 2024, equation 1)
  sparsegpt  w_ij^2 / [H_j^-1]_00     in 128 columns of all rows

or, with "2:4", two of four adjacent inputs of an output. X_j is a column of X.
H_j has the rows and columns from j on of X^T X plus 0.01 of the mean of its
diagonal. SparseGPT goes through the columns in order, and changes later weights
of an output so that it changes least (Frantar and Alistarh 2023, Algorithm 1).
"""

import numpy as np

_BLOCK = 128  # columns that SparseGPT compares with one another
_DAMPENING = 0.01
GROUP = 4  # inputs of "2:4"


def set_zeros(
  w: np.ndarray,
  method: str,
  sparsity: float | str,
  inputs: np.ndarray | None = None,
) -> np.ndarray:
  """Returns w, [outputs, inputs] float32, with the asked zeros.

  Of equal scores, that of the earlier output and input counts as smaller.

  Args:
    method: PRUNE.
    sparsity: SPARSITY, the share of zeros or "2:4".
    inputs: |X_j|^2, [inputs], for "wanda"; X^T X, [inputs, inputs], for
      "sparsegpt"; None for "magnitude". Zeros, as of an expert that no token
      chose, leave the choice to the magnitudes.
  """
  if method == "sparsegpt":
    assert inputs is not None
    return _compensate(w, sparsity, inputs)
  scores = np.abs(w.astype(np.float64))
  if inputs is not None and inputs.any():
    scores *= np.sqrt(inputs)
  zeros = _find_zeros(scores, sparsity, by_row=method == "wanda")
  return np.where(zeros, np.float32(0), w)


def _find_zeros(
  scores: np.ndarray, sparsity: float | str, *, by_row: bool
) -> np.ndarray:
  """Returns whether a weight becomes 0, for scores [outputs, inputs]."""
  if isinstance(sparsity, str):
    compared, count = scores.reshape(-1, GROUP), GROUP // 2
  else:
    compared = scores if by_row else scores.reshape(1, -1)
    count = round(sparsity * compared.shape[1])
  order = np.argsort(compared, 1, kind="stable")
  zeros = np.zeros(compared.shape, bool)
  np.put_along_axis(zeros, order[:, :count], True, 1)
  return zeros.reshape(scores.shape)


def _compensate(
  w: np.ndarray, sparsity: float | str, products: np.ndarray
) -> np.ndarray:
  """Returns what SparseGPT makes of w; for the arguments see `set_zeros`."""
  w, h = w.astype(np.float64), products.astype(np.float64)
  diagonal = np.einsum("ii->i", h)  # a view
  unused = diagonal == 0
  if not unused.all():
    w[:, unused] = 0.0  # no product needs the weight of such an input
  diagonal[unused] = 1.0
  diagonal += _DAMPENING * diagonal.mean()
  # Row j of this upper factor, times factor[j, j], is the first row of H_j^-1.
  factor = np.linalg.cholesky(np.linalg.inv(h)).T
  span = GROUP if isinstance(sparsity, str) else _BLOCK
  for begin in range(0, w.shape[1], _BLOCK):
    end = min(begin + _BLOCK, w.shape[1])
    errors = np.zeros([len(w), end - begin])
    for j in range(begin, end):
      if (j - begin) % span == 0:
        some = slice(j, min(j + span, end))
        scores = np.square(w[:, some] / np.diag(factor)[some])
        zeros = _find_zeros(scores, sparsity, by_row=False)
      is_zero = zeros[:, (j - begin) % span]
      error = np.where(is_zero, w[:, j] / factor[j, j], 0.0)
      w[:, j:end] -= np.outer(error, factor[j, j:end])
      w[is_zero, j] = 0.0
      errors[:, j - begin] = error
    w[:, end:] -= errors @ factor[begin:end, end:]
  return w.astype(np.float32)
