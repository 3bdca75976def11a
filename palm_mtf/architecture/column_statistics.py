# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Statistics of the inputs of products with a kernel, over a text."""

from typing import NamedTuple

import numpy as np


class ColumnStatistics(NamedTuple):
  """Sums over a text, for one kernel, or for the table of the logits."""

  # Sum of x^2 of each input, [inputs] or [experts, inputs] float64.
  sums: np.ndarray
  tokens: np.ndarray  # number of tokens, [] or [experts] int64
  # Sum of x^T x, [inputs, inputs] or [experts, inputs, inputs] float32; None if
  # it was not requested.
  hessian: np.ndarray | None = None
