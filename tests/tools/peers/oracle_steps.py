# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Steps of PaLM's optimizer by the oracle, for comparison with peers."""

from collections.abc import Iterator

import numpy as np

from tests import oracle
from tests.mtf_testing import PALM_OPTIMIZER

Arrays = dict[str, np.ndarray]


def _arrays(seed: int) -> Arrays:
  rng = np.random.default_rng(seed)
  return {
    "kernel": rng.standard_normal((4, 5)),
    "scale": 1e-5 * rng.standard_normal(6),  # below the floor of its size
  }


def initial_parameters() -> Arrays:
  """Returns the parameters before the first step, float64."""
  return _arrays(0)


def oracle_steps() -> Iterator[tuple[int, Arrays, Arrays]]:
  """Yields the number of a step, its gradients, the parameters after it."""
  params = initial_parameters()
  adafactor = oracle.Adafactor(PALM_OPTIMIZER, params)
  for k in range(1, 31):
    # Gradients with norms below and above the clipping norm.
    gradients = {n: g * 0.1 * (1 + k % 4) for n, g in _arrays(k).items()}
    params = adafactor.step(params, gradients)
    yield k, gradients, params
