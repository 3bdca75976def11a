# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Passes over memory, counted by hand for a block of round sizes."""

import dataclasses

from palm_mtf.accounting.memory import DeviceBytes
from palm_mtf.accounting.memory_traffic import (
  PASSES,
  activation_traffic,
  block_passes,
  step_traffic,
  update_traffic,
  weight_traffic,
)
from palm_mtf.accounting.params import count_norm_scales, count_parameters
from palm_mtf.config.mesh_layout import MeshLayout
from tests.accounting.published_sizes import PALM_8B
from tests.mtf_testing import SINGLE

C = dataclasses.replace(
  PALM_8B, num_layers=1, d_model=100, num_heads=2, d_kv=10, d_ff=400
)
C = dataclasses.replace(C, vocab_size=1000, sequence_length=50)
Q, KV, SCORES, COLUMNS = 20, 20, 100, 20 + 20 + 800


def test_a_parallel_block_passes_over_its_norm_product_and_softmax():
  blocks = 2 * 100 + 3 * 100 + COLUMNS + (Q + KV + 400)
  attention = 2 * SCORES
  # Of the norm and of what is read of the product.
  again = 2 * 100 + COLUMNS + (Q + KV + 400)
  back = 6 * 100 + 2 * COLUMNS + (Q + KV + 400)
  softmax_gradient = 3 * SCORES + 2 * Q
  assert block_passes(C, SINGLE) == {
    "blocks": blocks + again + back,
    "attention": attention + softmax_gradient,
  }
  layer = dataclasses.replace(C, remat="layer")
  assert block_passes(layer, SINGLE) == {
    "blocks": 2 * blocks + back,
    "attention": 2 * attention + softmax_gradient,
  }
  softmax = dataclasses.replace(C, remat="attention")
  assert block_passes(softmax, SINGLE) == {
    "blocks": blocks + again + back,
    "attention": 2 * attention + softmax_gradient,
  }


def test_the_loss_passes_twice_over_logits_and_writes_their_gradient():
  tokens = 8 * 50
  float32 = activation_traffic(C, SINGLE, 8)["loss"]
  assert float32 == tokens * 1000 * (2 * 4 + 2)
  rounded = dataclasses.replace(C, logits_dtype="activation")
  loss = activation_traffic(rounded, SINGLE, 8)["loss"]
  assert loss == tokens * 1000 * 3 * 2


def test_traffic_is_of_the_tokens_whatever_the_microbatches():
  parts = MeshLayout(mesh_shape="", layout="", num_microbatches=4)
  one = activation_traffic(C, SINGLE, 8)
  assert activation_traffic(C, parts, 8) == one
  twice = {kind: 2 * size for kind, size in one.items()}
  assert activation_traffic(C, SINGLE, 16) == twice


def test_each_microbatch_casts_kernels_twice_and_adds_its_gradients():
  kernels = count_parameters(C) - C.vocab_size * C.d_model
  others = C.vocab_size * C.d_model + count_norm_scales(C)
  parts = MeshLayout(mesh_shape="", layout="", num_microbatches=4)
  casts = 6 * (2 * kernels + others)
  assert weight_traffic(C, SINGLE) == casts
  sums = 12 * (kernels + others)
  assert weight_traffic(C, parts) == 4 * (casts + sums)
  float32 = dataclasses.replace(C, activation_dtype="float32")
  assert weight_traffic(float32, SINGLE) == 0


def test_the_update_reads_and_writes_weights_and_slots():
  kept = DeviceBytes(weights=400, slots=800, gradients=200)
  assert update_traffic(kept) == 3 * 200 + 3 * 400 + 2 * 800


def test_the_traffic_of_a_step_has_casts_sums_and_update_in_one_kind():
  kept = DeviceBytes(weights=400, slots=800, gradients=200)
  assert step_traffic(C, SINGLE, kept, 8) == {
    **activation_traffic(C, SINGLE, 8),
    "weights": weight_traffic(C, SINGLE) + update_traffic(kept),
  }
  assert set(step_traffic(C, SINGLE, kept, 8)) == set(PASSES)
