# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Names of CPUs and GPUs."""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.errors import UserError
from palm_mtf.mesh.host.placement import HostPlacement
from palm_mtf.native.operations import threads_here


@dataclasses.dataclass(frozen=True)
class HostDevices:
  """`Devices` that are CPUs or GPUs, of this process or of servers.

  Attributes:
    native_threads: threads of an operation of `native`; 0 where a process of
      these devices has none.
  """

  client: str
  pods: Sequence[Sequence[str]]
  native_threads: int = 0

  def placement(self, mesh: MeshLayout, pod: int) -> HostPlacement:
    """Returns the placement of a pod."""
    return HostPlacement(mesh, self.pods[pod], self.native_threads)


def local_devices(num_devices: int, num_pods: int = 1) -> HostDevices:
  """Returns devices of this process for pods of `num_devices` each.

  Raises:
    UserError: there are GPUs, and fewer than that.
  """
  gpus = len(tf.config.list_physical_devices("GPU"))
  needed = num_devices * num_pods
  if 0 < gpus < needed:
    raise UserError(
      f"MESH_SHAPE and NUM_PODS need {num_devices} x {num_pods} = {needed} "
      f"devices, and TensorFlow sees {gpus} GPUs here. Use at most as many, or "
      "set CUDA_VISIBLE_DEVICES=-1 for virtual devices on the CPU."
    )
  # CPU devices are virtual: `session_config` makes as many as are asked for.
  kind = "gpu" if gpus else "cpu"
  names = [f"/device:{kind}:{i}" for i in range(needed)]
  # Neighbours are one pod's.
  starts = range(0, needed, num_devices)
  return HostDevices(
    client="/device:cpu:0",
    pods=[names[i : i + num_devices] for i in starts],
    native_threads=0 if gpus else threads_here(),
  )
