# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The servers of each pod's devices: from ISLANDS, or chosen by the manager.

ISLANDS = [["a:2222/0-1", "b:2222/0-1"],   pod 0
           ["c:2222/0-1", "d:2222/0-1"]]   pod 1

The devices of a pod are in the order of its stages, and within a stage in the
order of the mesh: with STAGES = 2 and two devices in the mesh, server a has
stage 0 of pod 0, and server b has stage 1.
"""

import collections
import contextlib
import importlib.metadata
import itertools
import os
import re
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from palm_mtf import __version__
from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.runtime.addresses import is_loopback, resolve
from palm_mtf.runtime.manager.client import ManagerClient
from palm_mtf.runtime.manager.slices import Places, Wish

# An entry of ISLANDS: a server's address, and optionally the numbers of its
# devices, such as "host:2222/0-1,4".
_ENTRY = re.compile(
  r"([^\s/:]+:\d{1,5})(?:/(\d+(?:-\d+)?(?:,\d+(?:-\d+)?)*))?", re.ASCII
)


class Place(NamedTuple):
  """The server of a device, and the device's number on that server."""

  address: str  # "host:port" of the server
  device: int


def cluster_places(pods: PodsConfig, mesh: DeviceMesh) -> list[list[Place]]:
  """Returns each pod's devices in ISLANDS, with the IP addresses of servers.

  Raises UserError if ISLANDS or CLIENT_ADDRESS cannot be used.
  """
  return resolve_places(places_of_pods(pods, mesh), pods.client_address)


def places_of_pods(pods: PodsConfig, mesh: DeviceMesh) -> list[list[Place]]:
  """Returns the devices of each pod, in order, with host names from ISLANDS.

  Raises UserError if ISLANDS does not fit NUM_PODS or `mesh`, or names a device
  twice.
  """
  if len(pods.islands) != pods.num_pods:
    raise UserError(
      f"ISLANDS has {len(pods.islands)} pods and NUM_PODS = {pods.num_pods}: "
      "give each pod a list of its servers."
    )
  made = [_places(pod, x, mesh) for pod, x in enumerate(pods.islands)]
  _check_distinct(made)
  return made


def _places(pod: int, entries: Sequence[str], mesh: DeviceMesh) -> list[Place]:
  matches = [_parse_entry(pod, entry) for entry in entries]
  has, total = f'MESH_SHAPE = "{mesh.mesh_shape}"', mesh.pod_devices
  factors = [*mesh.axes.values()]
  if mesh.stages > 1:
    factors.insert(0, mesh.stages)
    has += f", STAGES = {mesh.stages}"
  needed = " x ".join(map(str, factors)) or "1"
  if len(factors) > 1:
    needed += f" = {total}"
  # A server without device numbers gets an equal share of the mesh. The last
  # mesh axis varies fastest: in "data:2,model:2" on two servers, devices that
  # differ only on the model axis are on the same server.
  share, left = divmod(total, max(1, len(entries)))
  if left and not all(match[2] for match in matches):
    raise UserError(
      f"ISLANDS: pod {pod} needs {needed} devices ({has}), which "
      f"{len(entries)} servers cannot share equally; name the devices of each "
      'server, as in "host:2222/0-1".'
    )
  given = [
    list(_parse_numbers(match[2]) if match[2] else range(share))
    for match in matches
  ]
  places = [
    Place(match[1], device)
    for match, devices in zip(matches, given, strict=True)
    for device in devices
  ]
  if len(places) != total:
    terms = " + ".join(str(len(devices)) for devices in given) or "0"
    terms += f" = {len(places)}" if len(given) > 1 else ""
    raise UserError(
      f"ISLANDS: pod {pod} has {terms} devices and needs {needed} ({has}); "
      "give as many as the pod needs."
    )
  return places


def _parse_entry(pod: int, entry: object) -> re.Match:
  match = _ENTRY.fullmatch(entry) if isinstance(entry, str) else None
  if not match or not 0 < int(match[1].rpartition(":")[2]) < 65536:
    raise UserError(
      f'ISLANDS: pod {pod} has {entry!r}: write "host:port", the port from 1 '
      'to 65535, or with its devices "host:port/0-3".'
    )
  return match


def _parse_numbers(text: str) -> Iterator[int]:
  for part in text.split(","):
    first, _, last = part.partition("-")
    yield from range(int(first), int(last or first) + 1)


def _check_distinct(pods: Sequence[Sequence[Place]]) -> None:
  """Raises UserError if a device is given twice, or a server is in two pods."""
  counts = collections.Counter(itertools.chain(*pods))
  ((place, count),) = counts.most_common(1)
  if count > 1:
    raise UserError(
      f"ISLANDS: device {place.device} of {place.address} is given {count} "
      "times; give each device once."
    )
  owners: dict[str, int] = {}
  for pod, places in enumerate(pods):
    for place in places:
      if owners.setdefault(place.address, pod) != pod:
        raise UserError(
          f"ISLANDS: {place.address} is in pods {owners[place.address]} and "
          f"{pod}; start a server for each pod."
        )


def resolve_places(
  pods: Sequence[Sequence[Place]], client_address: str
) -> list[list[Place]]:
  """Returns the places with host names replaced by IPv4 addresses.

  Raises UserError if other hosts cannot reach an address, or a name has none.
  """
  # The client sends servers IP addresses, not names, because a name may have a
  # loopback address in /etc/hosts of one host, and another address elsewhere.
  ips = {}
  for address in {x.address for x in itertools.chain(*pods)}:
    host, _, port = address.rpartition(":")
    ips[address] = resolve("ISLANDS", host), port
  client, _, _ = client_address.partition(":")
  client_ip = resolve("CLIENT_ADDRESS", client)
  near = sorted(x for x, (ip, _) in ips.items() if is_loopback(ip))
  far = sorted(x for x, (ip, _) in ips.items() if not is_loopback(ip))
  if far and near:
    raise UserError(
      f'ISLANDS: "{near[0]}" is {ips[near[0]][0]} on this host, which '
      f'"{far[0]}" cannot reach; give an address that all hosts reach.'
    )
  if far and is_loopback(client_ip):
    raise UserError(
      f'CLIENT_ADDRESS = "{client}" is {client_ip}, which "{far[0]}" cannot '
      "reach; give an address of this host that all servers reach."
    )
  return [
    [Place(":".join(ips[x.address]), x.device) for x in places]
    for places in pods
  ]


class ManagedPlaces:
  """Meshes of devices, "slices", that a manager allocates until `close`."""

  def __init__(self, pods: PodsConfig):
    self._pods = pods
    self._client = ManagerClient("MANAGER", pods.manager, pods.manager_tls)
    host, number = socket.gethostname(), secrets.token_hex(2)
    self._owner = f"{host}-{os.getpid()}-{number}"
    self.stream = self._client.open_turns(self._owner, pods.share)
    self._places: list[list[Place]] = []
    self._lost: set[str] = set()  # addresses of servers to avoid

  def close(self) -> None:
    """Gives the slices back to the manager."""
    self._client.close()

  def bind(self, shapes: Sequence[str], stages: int = 1) -> list[list[Place]]:
    """Returns each pod's devices, allocated without lost servers if possible.

    A pod has `stages` consecutive slices; `shapes` has the shape of each slice,
    such as "2x4". Raises UserError if no manager answers, or if no island
    (group of servers with a fast network) can hold a slice.
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
    """Returns whether `bind` with the same slices would give other devices."""
    with contextlib.suppress(UserError):
      return self._ask(is_trial=True) != self._found
    return False

  def avoid(self, pod: int) -> None:
    """Makes the next `bind` avoid the present servers of a pod that is lost."""
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
  """Returns the shape of each slice of a run: one per pod and stage."""
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
