# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The predicted step is that of the formula, worked out by hand."""

import math

import pytest

from palm_mtf.accounting.communication import sent_bytes
from palm_mtf.accounting.prediction import Link, step_secs
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.pods import PodsConfig

TINY = PalmConfig(
  num_layers=4,
  d_model=256,
  num_heads=4,
  d_kv=64,
  d_ff=1024,
  vocab_size=4096,
  sequence_length=256,
)
# Of 4,850,944 numbers (gin/models/palm_tiny.gin) the embedding has 4096 x 256.
EMBEDDING, OTHERS = 1_048_576, 3_802_368


def predicted(
  *, compute_secs=0.6, num_pods=2, dtype="float32", microbatches=1, **link
):
  mesh = MeshLayout(mesh_shape="", layout="", num_microbatches=microbatches)
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dtype)
  return step_secs(TINY, mesh, pods, compute_secs, Link(**link))


def test_gradients_are_all_parameters():
  mesh, pods = MeshLayout(mesh_shape="", layout=""), PodsConfig(num_pods=2)
  sent = sent_bytes(TINY, mesh, pods)
  assert sent["embedding"] == 4 * EMBEDDING
  assert sum(sent.values()) == 4 * (EMBEDDING + OTHERS)


def test_a_link_without_limits_costs_nothing():
  assert predicted() == 0.6


def test_of_a_fast_link_only_the_embeddings_gradient_is_seen():
  """The others, 12 ms, hide behind 400 ms of the backward pass."""
  secs = predicted(bits_per_sec=10e9)
  assert secs == pytest.approx(0.6 + 32 * EMBEDDING / 10e9)


def test_of_a_slow_link_the_backward_pass_hides_its_own_length():
  secs = predicted(bits_per_sec=200e6)
  rest = 32 * OTHERS / 200e6 - 0.4
  assert rest > 0
  assert secs == pytest.approx(0.6 + rest + 32 * EMBEDDING / 200e6)


def test_only_the_last_microbatch_hides_anything():
  more = predicted(bits_per_sec=200e6, microbatches=4)
  assert more - predicted(bits_per_sec=200e6) == pytest.approx(0.3)


def test_bfloat16_halves_and_pods_multiply_what_crosses():
  one = predicted(bits_per_sec=1e9) - 0.6
  half = predicted(bits_per_sec=1e9, dtype="bfloat16") - 0.6
  assert half == pytest.approx(one / 2)
  assert predicted(bits_per_sec=3e9, num_pods=4) - 0.6 == pytest.approx(one)


def test_three_messages_wait_for_the_delay():
  assert predicted(delay_secs=0.05) == pytest.approx(0.75)
  assert math.isinf(Link().bits_per_sec)
