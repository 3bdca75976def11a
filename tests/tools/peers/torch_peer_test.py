# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PyTorch takes the oracle's steps; products in int8 follow float32."""

import argparse

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


def test_products_in_int8_follow_products_in_float32():
  """Rounded operands change a loss little, and its gradients by percents."""
  import torch

  from tools.peers import torch_peer

  pytest.importorskip("torchao")
  torch.manual_seed(0)
  sizes = {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_kv": 32}
  sizes |= {"d_ff": 128, "vocab_size": 128, "sequence_length": 32}
  targets = torch.randint(128, (4, 32))
  inputs = torch.nn.functional.pad(targets[:, :-1], (1, 0))
  params = torch_peer.initial_parameters(argparse.Namespace(**sizes))
  tensors = torch_peer.list_tensors(params)
  found = []
  for is_int8 in (False, True):
    chosen = argparse.Namespace(**sizes, dtype="float32", int8=is_int8)
    for x in tensors:
      x.grad = None
      x.requires_grad_()
    tables = torch_peer.rotary_tables(chosen)
    loss = torch_peer.compute_loss(params, inputs, targets, chosen, tables)
    loss.backward()
    gradients = torch.cat([x.grad.ravel() for x in tensors])
    found.append((loss.item(), gradients.numpy()))
  (loss, gradients), (rounded_loss, rounded) = found
  assert rounded_loss == pytest.approx(loss, rel=0.01)
  assert 1e-4 < relative_error(rounded, gradients) < 0.1
