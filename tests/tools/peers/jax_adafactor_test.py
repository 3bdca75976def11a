# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's optimizer in JAX takes the oracle's steps."""

import jax
import numpy as np

from tests import oracle
from tests.mtf_testing import PALM_OPTIMIZER, relative_error
from tools.peers import jax_adafactor


def arrays(seed):
  rng = np.random.default_rng(seed)
  return {
    "kernel": rng.standard_normal((4, 5)),
    "scale": 1e-5 * rng.standard_normal(6),  # below the floor of its size
  }


def test_it_takes_the_oracle_s_steps():
  params = expected = arrays(0)
  adafactor = oracle.Adafactor(PALM_OPTIMIZER, params)
  with jax.enable_x64(True):
    state = jax_adafactor.init(jax.tree.map(jax.numpy.asarray, params))
    for k in range(1, 31):
      # Below and above the norm that is clipped.
      gradients = {n: g * 0.1 * (1 + k % 4) for n, g in arrays(k).items()}
      expected = adafactor.step(expected, gradients)
      params, state = jax_adafactor.step(
        params, state, gradients, *jax_adafactor.schedule(k)
      )
      for name, value in params.items():
        assert relative_error(value, expected[name]) < 1e-12, (name, k)


def test_the_learning_rate_is_the_paper_s():
  assert jax_adafactor.schedule(1) == (0.0, 0.01)
  assert jax_adafactor.schedule(40_000)[1] == 0.005
