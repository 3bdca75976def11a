# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of TPU devices, and where on the torus each of them lies."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.config import MeshLayout
from palm_mtf.config.tpu_slice import TpuSlice, chips_of_replicas
from palm_mtf.mesh.tpu.lowering import TpuLowering
from palm_mtf.mesh.tpu.placement import TpuPlacement


@dataclasses.dataclass(frozen=True)
class TpuDevices:
  """`Devices` that are TPUs; a pod is a slice of them."""

  client: str
  pods: Sequence[Sequence[str]]
  # Where replica i, which is device i of the mesh, lies on each pod's torus.
  assignments: Sequence[tf.tpu.experimental.DeviceAssignment]

  def placement(self, mesh: MeshLayout, pod: int) -> TpuPlacement:
    """Returns the placement of a pod."""
    return TpuPlacement(
      mesh, self.assignments[pod], self.pods[pod], TpuLowering
    )


def tpu_topology(where: TpuSlice) -> tf.tpu.experimental.Topology:
  """Returns the topology that TensorFlow would find on a slice."""
  return tf.tpu.experimental.Topology(
    mesh_shape=where.mesh_shape, device_coordinates=where.device_coordinates
  )


def tpu_devices(
  mesh: MeshLayout,
  where: TpuSlice,
  topologies: Sequence[tf.tpu.experimental.Topology],
  *,
  jobs: Sequence[str | None],
  client: str,
) -> TpuDevices:
  """Returns the devices of pods, each a slice of TPUs.

  Args:
    mesh: axes and layout rules of each pod.
    where: slice that each pod is.
    topologies: topology of each pod, as its TPUs say.
    jobs: job name of each pod; None is this process.
    client: TensorFlow's name of the client's CPU.
  """
  # The mesh's last axis, which moves most, gets a box of neighbouring chips.
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
