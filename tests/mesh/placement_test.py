# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Devices of TensorFlow have all members of the interface."""

import inspect

from palm_mtf.config import MeshLayout
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.mesh.placement import Devices, Lowering, Placement

MESH = MeshLayout(mesh_shape="data:2,model:2", layout="batch:data,heads:model")


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


def test_local_devices_have_all_members_of_the_interface():
  devices = local_devices(4)
  assert_has_all(devices, Devices)
  placement = devices.placement(MESH, 0)
  assert placement.cpu.endswith("/device:cpu:0")
  assert placement.shape.to_integer_list == [2, 2]
  assert_has_all(placement, Placement)
  assert_has_all(placement.lower, Lowering)
