# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How devices share Newton-Schulz steps, and their FLOPs.

communication_test.py compares the bytes that they send with a lowered step.
"""

import dataclasses

import pytest

from palm_mtf.accounting import newton_schulz
from palm_mtf.accounting.hardware import describe_remat
from palm_mtf.accounting.plan import tensor_bytes
from palm_mtf.config import HardwareConfig, MeshLayout
from tests.mtf_testing import SINGLE, small_config
from tests.settings import ADAMW, MUON, work


@pytest.mark.parametrize(
  ("sizes", "parts", "rows", "first", "second", "gathered", "summed"),
  [
    ((6, 8), (1, 1), 1, 6, 8, (), ()),
    ((6, 8), (1, 2), 1, 6, 4, (), (1,)),
    ((6, 8), (2, 1), 1, 6, 8, (0,), ()),
    ((8, 6), (4, 1), 1, 6, 2, (), (0,)),
    ((4, 3, 6), (2, 1, 2), 2, 6, 6, (2,), (0,)),
    ((8, 8), (1, 4), 1, 8, 2, (), (1,)),  # of equal sides, the whole one
    ((8, 8), (4, 1), 1, 8, 2, (), (0,)),
  ],
)
def test_the_shorter_side_is_whole_and_the_longer_one_is_shared(
  sizes, parts, rows, first, second, gathered, summed
):
  shares = newton_schulz.shares_of(sizes, parts, rows)
  assert shares[2:] == (first, second, gathered, summed)


def test_flops_are_those_of_three_products_per_step():
  """Jordan et al. 2024: X X^T, A A and B X, of a 6 x 8 matrix."""
  shares = newton_schulz.shares_of((6, 8), (1, 1), 1)
  products = 2 * 6 * 8 * 6 + 2 * 6 * 6 * 6 + 2 * 6 * 6 * 8
  assert shares.flops(5) == 5 * products


def flops_of(config, mesh, optimizer=MUON):
  return newton_schulz.device_flops(work(config, mesh, optimizer=optimizer))


def test_only_kernels_of_muon_cost_products():
  config = small_config()
  assert flops_of(config, SINGLE, ADAMW) == 0
  # d_model 24; heads * d_kv 40, d_kv 10, d_ff 36; two layers.
  sides = [(24, 40), (10, 24), (10, 24), (24, 40)] + 3 * [(24, 36)]
  products = sum(5 * 2 * a * a * (a + 2 * b) for a, b in sides)
  assert flops_of(config, SINGLE) == 2 * products
  split = MeshLayout(mesh_shape="model:2", layout="heads:model,d_ff:model")
  shared = [(24, 20), (10, 24), (10, 24), (24, 20)] + 3 * [(24, 18)]
  products = sum(5 * 2 * a * a * (a + 2 * b) for a, b in shared)
  assert flops_of(config, split) == 2 * products


def test_a_device_orthogonalizes_its_own_experts_one_by_one():
  experts = {"num_experts": 6, "experts_per_token": 2, "d_expert": 10}
  config = dataclasses.replace(small_config(), mlp="experts", **experts)
  # d_model 24; heads * d_kv 40, d_kv 10, d_expert 10, a router of 6.
  others = [(24, 40), (10, 24), (10, 24), (24, 40), (6, 24)]
  for num_devices in (1, 2):
    kernels = others + 3 * (6 // num_devices) * [(10, 24)]
    products = sum(5 * 2 * a * a * (a + 2 * b) for a, b in kernels)
    mesh = MeshLayout(mesh_shape=f"model:{num_devices}", layout="experts:model")
    assert flops_of(config, mesh) == 2 * products


def test_muon_needs_half_of_the_slots_and_more_buffers():
  sizes = {"vocab_size": 2, "sequence_length": 2, "d_model": 240}
  config = describe_remat(small_config(num_layers=1, **sizes), HardwareConfig())
  adamw, muon = (tensor_bytes(work(config, optimizer=x)) for x in (ADAMW, MUON))
  others = 2 * 240 + 2 * 240  # the embedding and scales keep two slots
  assert muon["slots"] == (adamw["slots"] - 8 * others) // 2 + 8 * others
  assert muon["buffers"] > adamw["buffers"]
