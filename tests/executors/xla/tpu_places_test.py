# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The devices of a slice fill its torus; a mesh's last axis lies in a box."""

import numpy as np
import pytest

from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.executors.xla.tpu_places import host_places, tpu_places


@pytest.mark.parametrize(
  "name", ["v2-256", "v3-32", "v4-16", "v4-4x4x8", "v6e-8", "v6e-32"]
)
def test_devices_of_hosts_fill_the_torus_once(name):
  where = tpu_slice(name)
  coordinates = np.array(host_places(where))
  assert coordinates.shape[0] == where.num_hosts
  found = {tuple(x) for x in coordinates.reshape([-1, 4])}
  assert found == set(np.ndindex(where.mesh_shape))


@pytest.mark.parametrize(
  ("name", "model_size"),
  [
    *[("v3-8", 8), ("v3-32", 8), ("v4-128", 16), ("v4-12x16x16", 12)],
    *[("v4-8", 1), ("v5p-128", 4), ("v6e-256", 4)],
  ],
)
def test_devices_of_a_model_axis_lie_in_a_box_and_all_are_used(
  name, model_size
):
  where = tpu_slice(name)
  chips = tpu_places(where, model_size)
  assert sorted(chips) == sorted(np.ndindex(where.mesh_shape))
  for group in np.split(np.array(chips), len(chips) // model_size):
    sides = np.ptp(group, axis=0) + 1
    assert np.prod(sides) == model_size


def test_a_model_axis_that_fits_no_box_still_uses_every_device_once():
  where = tpu_slice("v4-6x2x1")
  assert sorted(tpu_places(where, 4)) == sorted(np.ndindex(where.mesh_shape))
