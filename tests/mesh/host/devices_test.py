# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which devices a program gets."""

import pytest

from palm_mtf._tf import tf
from palm_mtf.errors import UserError
from palm_mtf.mesh.host.devices import local_devices


def with_gpus(monkeypatch, number):
  """Makes TensorFlow see GPUs, which this machine need not have."""
  monkeypatch.setattr(
    tf.config, "list_physical_devices", lambda kind: [kind] * number
  )


def test_without_gpus_any_number_of_devices_is_virtual(monkeypatch):
  with_gpus(monkeypatch, 0)
  devices = local_devices(2, 2)
  assert devices.pods == [
    ["/device:cpu:0", "/device:cpu:1"],
    ["/device:cpu:2", "/device:cpu:3"],
  ]


def test_gpus_are_used_in_order(monkeypatch):
  with_gpus(monkeypatch, 8)
  devices = local_devices(2, 2)
  assert devices.client == "/device:cpu:0"
  assert devices.pods == [
    ["/device:gpu:0", "/device:gpu:1"],
    ["/device:gpu:2", "/device:gpu:3"],
  ]


def test_fewer_gpus_than_devices_is_an_error_with_the_numbers(monkeypatch):
  with_gpus(monkeypatch, 3)
  with pytest.raises(UserError) as error:
    local_devices(2, 2)
  assert str(error.value) == (
    "MESH_SHAPE and NUM_PODS need 2 x 2 = 4 devices, and TensorFlow sees 3 "
    "GPUs here. Use at most as many, or set CUDA_VISIBLE_DEVICES=-1 for "
    "virtual devices on the CPU."
  )
