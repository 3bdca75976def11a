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
diagonal. SparseGPT also changes the weights that stay (Frantar and Alistarh
2023, Algorithm 1; replacement.py).
"""

import numpy as np

from palm_mtf.compression.replacement import BLOCK, Replace, replace_weights

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
    if (
      inputs.any()
    ):  # no product needs the weights of an input that is always 0
      w = np.where(np.diag(inputs) == 0, np.float32(0), w)
    size = GROUP if isinstance(sparsity, str) else BLOCK

    def choose(group: slice, values: np.ndarray, f: np.ndarray) -> Replace:
      del group
      scores = np.square(values / f).T
      zeros = _find_zeros(scores, sparsity, by_row=False).T
      return lambda i, weights: np.where(zeros[i], 0.0, weights)

    return replace_weights(w.T, inputs, size, choose).T
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
