# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of TPU devices, and the place of each device on the torus."""

import dataclasses
import math
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.config.tpu_slice import HOST_CHIPS, TpuSlice
from palm_mtf.mesh.tpu.lowering import TpuLowering
from palm_mtf.mesh.tpu.placement import TpuPlacement


@dataclasses.dataclass(frozen=True)
class TpuDevices:
  """`Devices` that are TPUs; each pod is a slice of TPUs."""

  client: str
  pods: Sequence[Sequence[str]]
  # For each pod, where each replica (device of the mesh) is on the TPU's torus.
  assignments: Sequence[tf.tpu.experimental.DeviceAssignment]

  def placement(
    self, mesh: DeviceMesh, pod: int, stage: int = 0
  ) -> TpuPlacement:
    """Returns the placement of a pod, which has no stages."""
    del stage
    return TpuPlacement(
      mesh, self.assignments[pod], self.pods[pod], TpuLowering
    )


def tpu_topology(where: TpuSlice) -> tf.tpu.experimental.Topology:
  """Returns the topology that TensorFlow would find on a TPU slice."""
  return tf.tpu.experimental.Topology(
    mesh_shape=where.mesh_shape, device_coordinates=device_coordinates(where)
  )


def tpu_devices(
  mesh: DeviceMesh,
  where: TpuSlice,
  topologies: Sequence[tf.tpu.experimental.Topology],
  *,
  jobs: Sequence[str | None],
  client: str,
) -> TpuDevices:
  """Returns the devices of pods; each pod is a slice of TPUs.

  Args:
    mesh: axes and layout rules of each pod.
    where: the TPU slice that each pod has.
    topologies: topology of each pod, as TensorFlow finds it.
    jobs: TensorFlow's job name of each pod; None means this process.
    client: TensorFlow's name of the client's CPU.
  """
  model_size = list(mesh.axes.values())[-1]
  coordinates = [[x] for x in chips_of_replicas(where, model_size)]
  assignments = [
    tf.tpu.experimental.DeviceAssignment(topology, coordinates)
    for topology in topologies
  ]
  pods = [
    [each.tpu_device(replica=i, job=job) for i in range(each.num_replicas)]
    for each, job in zip(assignments, jobs, strict=True)
  ]
  return TpuDevices(client, pods, assignments)


_Coordinates = tuple[int, int, int, int]  # chip's x, y, z; device in the chip


def device_coordinates(where: TpuSlice) -> list[list[_Coordinates]]:
  """Returns the coordinates of all devices, as [hosts][devices of the host]."""
  return [
    [
      # A chip's (x, y, z): the host's corner plus the chip's place in the host.
      (*(base + step for base, step in zip(corner, chip, strict=True)), i)
      for chip in _box_corners(HOST_CHIPS)
      for i in range(where.devices_of_chip)
    ]
    for corner in _box_corners(where.chips, HOST_CHIPS)
  ]


def _box_corners(
  shape: Sequence[int], step: Sequence[int] = (1, 1, 1)
) -> list[tuple[int, int, int]]:
  # Returns the lowest corners of boxes of size `step` that fill a box of size
  # `shape`. Sizes and corners are (x, y, z); x changes fastest.
  xs, ys, zs = (range(0, n, by) for n, by in zip(shape, step, strict=True))
  return [(x, y, z) for z in zs for y in ys for x in xs]


def chips_of_replicas(where: TpuSlice, model_size: int) -> list[_Coordinates]:
  """Returns the coordinates of each device of a mesh, in the mesh's order.

  The mesh's last axis carries the most traffic, many messages per layer. So the
  devices along this axis form a box of neighbouring chips, if the slice has a
  box of that size. In the box, the order of the mesh runs over the devices of a
  chip, then over chips along x, y and z.

  Args:
    where: the slice.
    model_size: size of the mesh's last axis.
  """
  box, left = [], model_size
  for n in (where.devices_of_chip, *where.chips):
    box.append(math.gcd(left, n))
    left //= box[-1]
  device, *chips = box
  if left > 1:  # no box has `model_size` devices
    device, chips = where.devices_of_chip, [1, 1, 1]
  return [
    (*(base + step for base, step in zip(corner, chip, strict=True)), i + j)
    for corner in _box_corners(where.chips, chips)
    for i in range(0, where.devices_of_chip, device)
    for chip in _box_corners(chips)
    for j in range(device)
  ]
