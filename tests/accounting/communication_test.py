# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes between pods; dcn_all_reduce_test.py compares them with the graph's."""

import dataclasses
import math

import pytest

from palm_mtf.accounting.communication import dcn_bytes
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


def test_one_pod_sends_nothing():
  assert dcn_bytes(PALM_8B, SINGLE, PodsConfig()) == 0


@pytest.mark.parametrize(("dtype", "size"), [("bfloat16", 2), ("float32", 4)])
@pytest.mark.parametrize(("num_pods", "pairs"), [(2, 2), (3, 6), (4, 12)])
def test_every_pod_sends_every_gradient_to_every_other(
  num_pods, pairs, dtype, size
):
  pods = PodsConfig(num_pods=num_pods, dcn_dtype=dtype)
  numbers = count_parameters(PALM_8B) + count_norm_scales(PALM_8B)
  expected = pairs * (numbers * size + 3 * 4)
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
  numbers = count_parameters(PALM_8B) + count_norm_scales(PALM_8B)
  expected = 2 * (2 * numbers + 8 * 3 * 4)
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
