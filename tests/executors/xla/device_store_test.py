# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A client's arrays stay in a process until the client leaves."""

import jax
import numpy as np
import pytest

from palm_mtf.executors.xla.device_store import (
  PodDevices,
  free_stores,
  open_store,
)
from palm_mtf.executors.xla.devices import PodName, find_devices
from palm_mtf.json_text import dataclass_text
from tests.mtf_testing import mesh_layout


@pytest.fixture
def opened():
  devices = find_devices(mesh_layout("fully sharded", tpu="v4-8"))
  pod = PodDevices(jax.sharding.Mesh(devices, "data"))
  name = dataclass_text(PodName("client", 0, 1)).encode()
  yield open_store(name, lambda *_: pod)
  free_stores("client")


def test_an_array_is_replaced_when_the_rows_of_all_devices_are_set(opened):
  """Two layers of [4, 3]; four devices split the rows of a layer."""
  store, pod = opened
  spec = jax.sharding.PartitionSpec(None, "data")
  sharding = jax.sharding.NamedSharding(pod.mesh, spec)
  whole = jax.ShapeDtypeStruct([2, 4, 3], np.float32, sharding=sharding)
  value = np.arange(24, dtype=np.float32).reshape(2, 4, 3)
  parts = [(layer, device) for device in (2, 0, 3, 1) for layer in (1, 0)]
  for layer, device in parts:
    assert "x" not in store.arrays
    rows = range(layer, layer + 1)
    store.assign(pod, "x", whole, device, value[layer, device], rows, 2)
  np.testing.assert_array_equal(store.arrays["x"], value)
  found = store.find_slice(pod, "x", 3)
  np.testing.assert_array_equal(found, value[:, 3:])
