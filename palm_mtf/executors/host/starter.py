# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens the CPUs and GPUs of TensorFlow for clients."""

from collections.abc import Sequence

from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices, Devices, local_devices
from palm_mtf.mesh.session import session_config
from palm_mtf.native.operations import operations
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.client.pod_hosts import LocalDevices, PodHosts
from palm_mtf.runtime.server_info import check_bfloat16


class HostStarter:
  """Opens the devices of TensorFlow; see `Starter`."""

  check_servers = staticmethod(check_bfloat16)

  def open_here(self, mesh: DeviceMesh, num_pods: int) -> LocalDevices:
    """Takes CPUs, or GPUs if this process has any."""
    return LocalDevices(
      local_devices(mesh.pod_devices, num_pods),
      session_config(mesh.pod_devices, num_pods),
    )

  def start(
    self, mesh: DeviceMesh, pods: PodsConfig, hosts: PodHosts
  ) -> Devices:
    """Takes the CPUs of servers, which are ready."""
    infos = list(hosts.infos.values())
    # If one server lacks palm_mtf's C++ operations, no pod uses them, because
    # the results have to be bit-identical on all pods.
    native = operations() and all(x.has_native for x in infos)
    threads = infos[0].num_threads if native else 0
    return CpuGpuDevices(hosts.client, hosts.devices, native_threads=threads)

  def find_places(
    self, places: Sequence[Sequence[Place]]
  ) -> Sequence[Sequence[Place]]:
    """Returns `places`: each device is one of TensorFlow's."""
    return places

  def describe_failure(self, message: str, phase: str) -> str | None:
    """Returns None: TensorFlow's errors describe themselves."""
    return None
