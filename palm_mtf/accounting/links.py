# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Seconds of the collectives of a pod, by its links.

On a torus a mesh axis has the links of the dimensions it lies along, of which a
line has half of what a ring has. Devices behind a switch have all their links,
and the network between such groups.
"""

import math

from palm_mtf.config.hardware import HardwareConfig
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.tpu_topology import tpu_slice


def axes_bandwidth(
  mesh: MeshLayout, axes: tuple[str, ...], device: HardwareConfig
) -> float:
  """Returns the bytes/s that a device sends and receives along mesh axes.

  Args:
    mesh: devices of a pod.
    axes: names of the axes of a collective.
    device: rates of one device; those of links are known.
  """
  if device.chip_link_dims:
    rings = _rings(mesh, device)
    total = min(sum(rings[axis] for axis in axes), device.chip_link_dims)
    return device.chip_link_bandwidth * total / device.chip_link_dims
  joined = device.chip_link_chips
  if joined is None or mesh.num_devices <= joined:
    return device.chip_link_bandwidth
  # Devices in order, the last axis fastest: a group's neighbours in one host
  # bring in its data together.
  names = list(mesh.axes)
  inner = math.prod(mesh.axes[x] for x in names[names.index(axes[-1]) + 1 :])
  size = math.prod(mesh.axes[axis] for axis in axes)
  if inner * size <= joined:
    return device.chip_link_bandwidth
  neighbours = max(1, joined // inner)
  network = neighbours * device.chip_dcn_bandwidth
  return min(device.chip_link_bandwidth, network)


def _rings(mesh: MeshLayout, device: HardwareConfig) -> dict[str, float]:
  """Returns torus dimensions of links by mesh axis; a line is half of one."""
  *outer, inner = mesh.axes
  if not mesh.tpu:
    return _rings_of_any_slice(mesh, device)
  where = tpu_slice(mesh.tpu)
  left = mesh.axes[inner] // math.gcd(mesh.axes[inner], where.devices_of_chip)
  rings = dict.fromkeys(mesh.axes, 0.0)
  for size in where.chips:
    # As chips_of_replicas places the last axis, in a box.
    part = math.gcd(left, size)
    left //= part
    if part > 1:
      rings[inner] += 1.0 if part == size else 0.5
    if part < size and outer:
      rings[outer[0]] += 1.0 if part == 1 else 0.5
  # Devices of one chip, or a box that does not fit: neighbours along a line.
  return {axis: n or 0.5 for axis, n in rings.items()}


def _rings_of_any_slice(
  mesh: MeshLayout, device: HardwareConfig
) -> dict[str, float]:
  """Returns `_rings` where no slice is named: the best that devices can lie."""
  *outer, inner = (axis for axis, size in mesh.axes.items() if size > 1)
  dims = device.chip_link_dims
  if not outer:
    return {inner: float(dims)}
  longest = (device.chip_link_chips or math.inf) ** (1 / dims)
  of_inner = 1
  while of_inner < dims - 1 and mesh.axes[inner] > longest**of_inner:
    of_inner += 1
  return {inner: float(of_inner), outer[0]: float(dims - of_inner)}
