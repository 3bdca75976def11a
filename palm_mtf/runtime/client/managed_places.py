# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager chooses the servers of slices, such as those of pods."""

import contextlib
import importlib.metadata
import os
import secrets
import socket
from collections.abc import Sequence

from palm_mtf import __version__
from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.runtime.client.places import Place, resolve_places
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Places, Wish


class ManagedPlaces:
  """Slices of this process, which has them until `close`.

  Attributes:
    stream: call of the manager's stream of turns.
  """

  def __init__(self, pods: PodsConfig):
    """Opens a client of the manager; raises UserError if its key is wrong."""
    self._pods = pods
    self._client = ManagerClient("MANAGER", pods.manager, pods.manager_tls)
    host, number = socket.gethostname(), secrets.token_hex(2)
    self._owner = f"{host}-{os.getpid()}-{number}"
    self.stream = self._client.open_turns(self._owner, pods.share)
    self._places: list[list[Place]] = []
    self._lost: set[str] = set()  # addresses of servers

  def close(self) -> None:
    """Gives the slices back."""
    self._client.close()

  def bind(self, shapes: Sequence[str], stages: int = 1) -> list[list[Place]]:
    """Returns each pod's devices; asks for other servers than the lost ones.

    Args:
      shapes: shape of each slice, such as "2x4".
      stages: number of consecutive slices that are a pod.

    Raises:
      UserError: no island can hold a slice, or no manager answers.
    """
    self._wish = _make_wish(self._pods, shapes)
    self._found = found = self._ask()
    places = [
      [Place(*x) for devices in found[i : i + stages] for x in devices]
      for i in range(0, len(found), stages)
    ]
    self._places = resolve_places(places, self._pods.client_address)
    return self._places

  def must_move(self) -> bool:
    """Returns whether `bind` would now give other devices, as after a drain."""
    with contextlib.suppress(UserError):
      return self._ask(is_trial=True) != self._found
    return False

  def avoid(self, pod: int) -> None:
    """Makes the next `bind` avoid the servers that a pod has now."""
    self._lost |= {x.address for x in self._places[pod]}

  def _ask(self, is_trial: bool = False) -> Places:
    lost = self._lost
    return self._client.allocate(self._owner, self._wish, lost, is_trial)


def check_slices(pods: PodsConfig, mesh: DeviceMesh) -> None:
  """Raises UserError if the manager cannot give each pod its devices now."""
  with ManagerClient("MANAGER", pods.manager, pods.manager_tls) as client:
    wish = _make_wish(pods, pod_slices(pods, mesh))
    client.allocate("trial", wish, is_trial=True)


def pod_slices(pods: PodsConfig, mesh: DeviceMesh) -> list[str]:
  """Returns the shapes of the slices of all pods, one per stage."""
  shape = "x".join(map(str, mesh.axes.values())) or "1"
  return [shape] * (pods.num_pods * mesh.stages)


def _make_wish(pods: PodsConfig, shapes: Sequence[str]) -> Wish:
  return Wish(
    slices=shapes,
    device_bytes=pods.device_bytes or 0,
    islands=str(pods.islands),
    kind={
      "palm_mtf": __version__,
      "tensorflow": importlib.metadata.version("tensorflow"),
    },
  )
