# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Both implementations have all members of the interface."""

import inspect

import pytest

from palm_mtf.config import MeshLayout
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.placement import Devices, Lowering, Placement
from palm_mtf.mesh.tpu.devices import tpu_devices, tpu_topology

MESH = MeshLayout(
  mesh_shape="data:2,model:2", layout="batch:data,heads:model", tpu="v4-8"
)


def devices_of_tpus():
  where = tpu_slice(MESH.tpu)
  topologies = [tpu_topology(where)]
  client = "/device:cpu:0"
  return tpu_devices(MESH, where, topologies, jobs=[None], client=client)


def parameters(function):
  names = inspect.signature(function).parameters
  return [name for name in names if name != "self"]


def assert_has_all(thing, protocol):
  """Compares attributes, methods and the parameters of methods."""
  assert set(protocol.__annotations__) <= set(dir(thing))
  for name, method in vars(protocol).items():
    if inspect.isroutine(method) and not name.startswith("_"):
      expected = parameters(getattr(protocol, name))
      found = parameters(getattr(thing, name))
      assert found[: len(expected)] == expected, name
      assert set(found) - set(expected) <= {"stack"}, name  # Mesh TensorFlow's


@pytest.mark.parametrize("make", [lambda: local_devices(4), devices_of_tpus])
def test_an_implementation_has_all_members_of_the_interface(make):
  devices = make()
  assert_has_all(devices, Devices)
  placement = devices.placement(MESH, 0)
  assert placement.cpu.endswith("/device:cpu:0")
  assert placement.shape.to_integer_list == [2, 2]
  assert_has_all(placement, Placement)
  assert_has_all(placement.lower, Lowering)
