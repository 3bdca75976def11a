# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""ISLANDS = "auto": the manager chooses the servers of each pod."""

import dataclasses
import importlib.metadata
import os
import secrets
import socket

from palm_mtf import __version__
from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.runtime.client.places import Place, resolve_places
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Wish


class ManagedPlaces:
  """Slices for the pods of this process, which has them until `close`.

  Attributes:
    stream: call of the manager's stream of turns.
  """

  def __init__(self, pods: PodsConfig):
    """Opens a client of the manager; raises UserError if its key is wrong."""
    self._client = ManagerClient("MANAGER", pods.manager, pods.manager_tls)
    host, number = socket.gethostname(), secrets.token_hex(2)
    self._owner = f"{host}-{os.getpid()}-{number}"
    self.stream = self._client.open_turns(self._owner, pods.share)
    self._places: list[list[Place]] = []
    self._lost: set[str] = set()  # addresses of servers

  def close(self) -> None:
    """Gives the slices back."""
    self._client.close()

  def bind(self, pods: PodsConfig, mesh: DeviceMesh) -> list[list[Place]]:
    """Returns each pod's devices; asks for other servers than the lost ones.

    Raises:
      UserError: no island can hold a pod, or no manager answers.
    """
    found = self._client.allocate(self._owner, _wish(pods, mesh), self._lost)
    host, _, _ = pods.client_address.partition(":")
    # A pod has the slices of its stages, one after another.
    places = [
      [Place(*x) for devices in found[i : i + mesh.stages] for x in devices]
      for i in range(0, len(found), mesh.stages)
    ]
    self._places = resolve_places(places, host)
    return self._places

  def avoid(self, pod: int) -> None:
    """Makes the next `bind` avoid the servers that a pod has now."""
    self._lost |= {x.address for x in self._places[pod]}


def check_slices(pods: PodsConfig, mesh: DeviceMesh) -> None:
  """Raises UserError if the manager cannot give each pod its devices now."""
  with ManagerClient("MANAGER", pods.manager, pods.manager_tls) as client:
    wish = dataclasses.asdict(_wish(pods, mesh))
    client.call("allocate", owner="trial", wish=wish, is_trial=True)


def _wish(pods: PodsConfig, mesh: DeviceMesh) -> Wish:
  shape = "x".join(map(str, mesh.axes.values())) or "1"
  return Wish(
    slices=[shape] * (pods.num_pods * mesh.stages),
    kind={
      "palm_mtf": __version__,
      "tensorflow": importlib.metadata.version("tensorflow"),
    },
  )
