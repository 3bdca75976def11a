# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's optimizer in PyTorch takes the oracle's steps."""

import numpy as np
import pytest

from tests import oracle
from tests.mtf_testing import PALM_OPTIMIZER, relative_error

torch = pytest.importorskip("torch")


def arrays(seed):
  rng = np.random.default_rng(seed)
  return {
    "kernel": rng.standard_normal((4, 5)),
    "scale": 1e-5 * rng.standard_normal(6),  # below the floor of its size
  }


def test_it_takes_the_oracle_s_steps():
  from tools.peers.torch_adafactor import Adafactor

  expected = arrays(0)
  parameters = {n: torch.tensor(x) for n, x in expected.items()}
  adafactor = Adafactor(parameters.values())
  reference = oracle.Adafactor(PALM_OPTIMIZER, expected)
  for k in range(1, 31):
    # Below and above the norm that is clipped.
    gradients = {n: g * 0.1 * (1 + k % 4) for n, g in arrays(k).items()}
    expected = reference.step(expected, gradients)
    for name, p in parameters.items():
      p.grad = torch.tensor(gradients[name])
    adafactor.step()
    for name, p in parameters.items():
      assert p.grad is None
      assert relative_error(p.numpy(), expected[name]) < 1e-12, (name, k)
