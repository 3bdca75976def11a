# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes between pods and the steps they make, worked out by hand.

gradient_sums_test.py compares the bytes with those of the graph.
"""

import dataclasses
import math

import pytest

from palm_mtf.accounting.communication import Link, dcn_bytes, step_secs
from palm_mtf.accounting.params import (
  count_norm_scales,
  count_parameters,
  parameter_shapes,
)
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import PodsConfig
from tests.accounting.published_sizes import PALM_8B, PALM_540B

SINGLE = MeshLayout(mesh_shape="", layout="")
TWO_PODS = PodsConfig(num_pods=2, dcn_dtype="bfloat16")
NUMBERS = count_parameters(PALM_8B) + count_norm_scales(PALM_8B)


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize(
  ("num_pods", "pairs"), [(1, 0), (2, 2), (3, 6), (4, 12)]
)
def test_every_pod_sends_every_gradient_to_every_other(
  num_pods, pairs, dtype, size
):
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dtype)
  expected = pairs * (NUMBERS * size + 3 * 4)
  assert dcn_bytes(PALM_8B, SINGLE, pods) == expected


def test_palm_540b_sends_what_its_paper_says():
  """1.3 GB per host and step, of 768 hosts in each of two pods (PaLM 4)."""
  from_a_host = dcn_bytes(PALM_540B, SINGLE, TWO_PODS) / 2 / 768
  assert from_a_host / 2**30 == pytest.approx(1.31, abs=0.005)


@pytest.mark.parametrize(
  "layout",
  [
    "batch:data",
    "batch:data,heads:model,d_ff:model,vocab:model",
    "batch:data,heads:model,d_ff:model,vocab:model,d_model_stored:data",
  ],
)
def test_no_two_devices_of_a_pod_send_the_same(layout):
  """Whatever the layout, only the three sums are sent by each of them."""
  shape = "data:2,model:4" if ":model" in layout else "data:8"
  split = MeshLayout(mesh_shape=shape, layout=layout)
  expected = 2 * (2 * NUMBERS + 8 * 3 * 4)
  assert dcn_bytes(PALM_8B, split, TWO_PODS) == expected


def test_parts_of_one_size_need_a_little_padding():
  """44 rows are 45 on three devices; 10 numbers, in thirds, are 12."""
  split = MeshLayout(mesh_shape="model:3", layout="vocab:model")
  c = dataclasses.replace(PALM_8B, num_layers=1, vocab_size=44, d_model=10)
  shapes = parameter_shapes(c)
  del shapes["embedding"]
  numbers = 45 * 10
  numbers += sum(3 * math.ceil(math.prod(x) / 3) for x in shapes.values())
  assert dcn_bytes(c, split, TWO_PODS) == 2 * (2 * numbers + 3 * 3 * 4)


# gin/models/palm_tiny.gin: 4,850,944 numbers, of the embedding 4096 x 256.
TINY = dataclasses.replace(
  PALM_8B, num_layers=4, d_model=256, num_heads=4, d_kv=64, d_ff=1024
)
TINY = dataclasses.replace(TINY, vocab_size=4096, sequence_length=256)
EMBEDDING, OTHERS = 1_048_576, 3_802_368


def predicted(
  *, compute_secs=0.6, num_pods=2, dtype="float32", microbatches=1, **link
):
  mesh = MeshLayout(mesh_shape="", layout="", num_microbatches=microbatches)
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dtype)
  return step_secs(TINY, mesh, pods, compute_secs, Link(**link))


def test_of_a_fast_link_only_the_embeddings_gradient_is_seen():
  """The others, 12 ms, hide behind 400 ms of the backward pass."""
  secs = predicted(bits_per_sec=10e9)
  assert secs == pytest.approx(0.6 + 32 * EMBEDDING / 10e9)


def test_of_a_slow_link_the_last_backward_pass_hides_its_own_length():
  rest = 32 * OTHERS / 200e6 - 0.4
  assert rest > 0
  secs = predicted(bits_per_sec=200e6)
  assert secs == pytest.approx(0.6 + rest + 32 * EMBEDDING / 200e6)
  more = predicted(bits_per_sec=200e6, microbatches=4)
  assert more - secs == pytest.approx(0.3)


def test_bfloat16_halves_and_pods_multiply_what_crosses():
  one = predicted(bits_per_sec=1e9) - 0.6
  half = predicted(bits_per_sec=1e9, dtype="bfloat16") - 0.6
  assert half == pytest.approx(one / 2)
  assert predicted(bits_per_sec=3e9, num_pods=4) - 0.6 == pytest.approx(one)


def test_three_messages_wait_for_the_delay_and_no_limit_costs_nothing():
  assert predicted() == 0.6
  assert predicted(delay_secs=0.05) == pytest.approx(0.75)
