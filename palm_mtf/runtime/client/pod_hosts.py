# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a client needs from the executor that computes on its pods' hosts."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.server_info import ServerInfo


class LocalDevices(NamedTuple):
  """The devices of all pods in this process, and how a session uses them."""

  devices: Devices
  config: tf.ConfigProto
  # Frees what the executor holds in this process outside of the session.
  release: Callable[[], None] = lambda: None


class PodHosts(NamedTuple):
  """The servers that hold a client's pods."""

  name: str  # the client's job in TensorFlow's cluster
  client: str  # TensorFlow's name of the client's CPU
  # For each pod, {address of a server: its process}, in the order of the mesh.
  processes: Sequence[Mapping[str, Process]]
  devices: Sequence[Sequence[str]]  # TensorFlow's devices of each pod
  infos: Mapping[str, ServerInfo]  # by the server's address


class Starter(Protocol):
  """Opens the devices of pods, for clients; part of an executor."""

  def open_here(self, mesh: DeviceMesh, num_pods: int) -> LocalDevices:
    """Opens this process's devices; UserError if the pods need others."""

  def start(
    self, mesh: DeviceMesh, pods: PodsConfig, hosts: PodHosts
  ) -> Devices:
    """Makes all servers ready to compute; UserError if one cannot."""

  def find_places(
    self, places: Sequence[Sequence[Place]]
  ) -> Sequence[Sequence[Place]]:
    """Returns the TensorFlow devices that stand for the devices at `places`."""

  def check_servers(self, infos: Mapping[str, ServerInfo], dtype: str) -> None:
    """Raises UserError if a server cannot compute in ACTIVATION_DTYPE."""

  def describe_failure(self, message: str, phase: str) -> str | None:
    """Returns the executor's failure in a TensorFlow error, and a fix.

    Args:
      message: message of the TensorFlow error.
      phase: what the run was doing, such as "in step 8".

    Returns:
      One line; None if the error is not of the executor.
    """
