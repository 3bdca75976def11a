# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's optimizer in PyTorch takes the oracle's steps."""

import pytest

from tests.mtf_testing import relative_error
from tests.tools.peers.oracle_steps import initial_parameters, oracle_steps

pytestmark = pytest.mark.peers


def test_it_takes_the_oracle_s_steps():
  import torch

  from tools.peers.torch_peer import Adafactor

  parameters = {n: torch.tensor(x) for n, x in initial_parameters().items()}
  adafactor = Adafactor(parameters.values())
  for k, gradients, expected in oracle_steps():
    for name, p in parameters.items():
      p.grad = torch.tensor(gradients[name])
    adafactor.step()
    for name, p in parameters.items():
      assert p.grad is None
      assert relative_error(p.numpy(), expected[name]) < 1e-12, (name, k)
