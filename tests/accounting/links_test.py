# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What an axis of the mesh has of a pod's links, worked out by hand."""

import pytest

from palm_mtf.accounting.links import axes_bandwidth
from palm_mtf.cli.gin_files import hardware_of
from palm_mtf.config.mesh_layout import MeshLayout

V4, A100 = hardware_of("tpu_v4"), hardware_of("a100")


def mesh(shape, tpu=""):
  rules = {"data": "batch:data", "model": "heads:model"}
  layout = ",".join(rules[x.split(":")[0]] for x in shape.split(","))
  return MeshLayout(mesh_shape=shape, layout=layout, tpu=tpu)


@pytest.mark.parametrize(
  ("shape", "tpu", "of_model", "of_data"),
  [
    # 12 along x, a ring of 100 GB/s; 256 along the rings y and z.
    ("data:256,model:12", "v4-12x16x16", 100e9, 200e9),
    ("data:64,model:8", "v4-8x8x8", 100e9, 200e9),
    # Both along x, 4 of 8: lines, without the link that closes a ring.
    ("data:128,model:4", "v4-8x8x8", 50e9, 250e9),
    ("data:32,model:16", "v4-8x8x8", 150e9, 150e9),
    # No slice is named.
    ("data:256,model:12", "", 100e9, 200e9),
    ("data:64,model:64", "", 200e9, 100e9),
  ],
)
def test_an_axis_has_the_rings_and_lines_that_it_lies_along(
  shape, tpu, of_model, of_data
):
  layout = mesh(shape, tpu)
  assert axes_bandwidth(layout, ("model",), V4) == pytest.approx(of_model)
  assert axes_bandwidth(layout, ("data",), V4) == pytest.approx(of_data)
  together = axes_bandwidth(layout, ("data", "model"), V4)
  assert together == pytest.approx(300e9)


def test_one_axis_has_all_links_of_a_torus():
  assert axes_bandwidth(mesh("data:64"), ("data",), V4) == 300e9


@pytest.mark.parametrize(
  ("shape", "axis", "bandwidth"),
  [
    ("data:8", "data", 300e9),  # one host
    ("data:4,model:8", "model", 300e9),
    ("data:4,model:8", "data", 25e9),  # one device a host, its own network
    ("data:8,model:4", "data", 50e9),  # two devices a host
    ("data:64", "data", 200e9),  # eight
    ("data:2,model:16", "model", 200e9),
  ],
)
def test_behind_switches_neighbours_share_the_network(shape, axis, bandwidth):
  assert axes_bandwidth(mesh(shape), (axis,), A100) == bandwidth
