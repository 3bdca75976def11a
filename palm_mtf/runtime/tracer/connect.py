# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Connects clients of traced programs: to servers, or to a manager's slices."""

import contextlib
from collections.abc import Iterator, Sequence

from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import check_count
from palm_mtf.machine.host_memory import memory_bytes
from palm_mtf.runtime.client.connect import Cluster
from palm_mtf.runtime.client.connect import connect as connect_devices
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.client.turns import OwnTurns
from palm_mtf.runtime.tracer.client import RuntimeClient


@contextlib.contextmanager
def connect(
  servers: Sequence[str] | int = (),
  *,
  devices: int = 8,
  budget: int = 0,
  client_address: str = "127.0.0.1",
  timeout_secs: float = 60.0,
) -> Iterator[RuntimeClient]:
  """Connects to devices: of this process, or of servers.

  Args:
    servers: "host:port" of each server of `palm_mtf pods serve`; or how many
      server processes to start on this machine.
    devices: devices of this process, or of each server to start.
    budget: bytes of buffers that a device may hold; 0 for the memory that is
      free now.
    client_address: address of this host where servers reach the client.
    timeout_secs: a server that is silent for so long is lost.

  Yields:
    A RuntimeClient, whose buffers end with it.

  Raises:
    UserError: a server cannot be used.
  """
  check_count("budget", budget, minimum=0)
  num_local, addresses = 0, servers
  if isinstance(servers, int):
    num_local, addresses = servers, ()
    check_count("servers", num_local, minimum=0)
  kind = "local_servers" if num_local else "in_process"
  pods = PodsConfig(
    num_pods=num_local or 1,
    pods="cluster" if addresses else kind,
    islands=[addresses] if addresses else (),
    client_address=client_address,
    pod_timeout_secs=timeout_secs,
  )
  # To begin with, one device of each address.
  mesh = DeviceMesh(mesh_shape=f"x:{len(addresses) or devices}", layout="")
  with PodServers(pods, mesh) as started:
    places = started.places()
    heartbeat = Heartbeat(started, places, timeout_secs)
    infos = heartbeat.infos
    if addresses:
      of_each = {x.address: infos[x.address].num_devices for x in places[0]}
      places = [[Place(x, i) for x, n in of_each.items() for i in range(n)]]
    cluster = connect_devices(pods, mesh, places, infos)
    names = [x for pod in cluster.devices.pods for x in pod]
    _, available = memory_bytes()
    budgets = dict.fromkeys(names, budget or available // len(names))
    if addresses and not budget:
      pairs = zip(names, places[0], strict=True)
      budgets = {x: infos[y.address].device_bytes for x, y in pairs}
    turns = OwnTurns(budgets)
    with _open_client(cluster, [names], heartbeat) as client:
      client.programs.take_turn, client.programs.free = turns.take, turns.free
      yield client


@contextlib.contextmanager
def connect_managed(
  manager: str,
  slices: Sequence[str],
  *,
  device_bytes: int = 0,
  islands: str = "auto",
  share: float = 1.0,
  manager_tls: str = "",
  client_address: str = "127.0.0.1",
  timeout_secs: float = 60.0,
) -> Iterator[RuntimeClient]:
  """Connects to slices that a manager binds to servers.

  Args:
    manager: "host:port" of `palm_mtf pods manage`.
    slices: shape of each slice, such as "2x2". The client's virtual slices lie
      on their devices.
    device_bytes: memory in bytes that each device needs.
    islands: "auto", on any islands; "same", all slices on one island; or
      "apart", each slice on another island.
    share: the client's share of the devices' time (`pods manage --policy`).
    manager_tls: PREFIX of the manager's key and certificate, or "".
    client_address: address of this host where servers reach the client.
    timeout_secs: a server that is silent for so long is lost.

  Yields:
    A RuntimeClient, whose buffers and slices end with it.

  Raises:
    UserError: no island can hold a slice, or a server cannot be used.
  """
  pods = PodsConfig(
    pods="cluster",
    islands=islands,
    manager=manager,
    manager_tls=manager_tls,
    device_bytes=device_bytes,
    share=share,
    client_address=client_address,
    pod_timeout_secs=timeout_secs,
  )
  mesh = DeviceMesh(mesh_shape="", layout="")
  with PodServers(pods, mesh) as started:
    places = started.managed.bind(slices)
    heartbeat = Heartbeat(started, places, timeout_secs)
    cluster = connect_devices(
      pods, mesh, places, heartbeat.infos, started.stream
    )
    with _open_client(cluster, cluster.devices.pods, heartbeat) as client:
      yield client


@contextlib.contextmanager
def _open_client(
  cluster: Cluster, slices: Sequence[Sequence[str]], heartbeat: Heartbeat
) -> Iterator[RuntimeClient]:
  """Opens a client whose virtual slices lie on the devices of `slices`."""
  with heartbeat, cluster.client() as programs:
    with heartbeat.during("at the start"):
      heartbeat.connect(programs)
    client = RuntimeClient(programs, slices, heartbeat)
    try:
      yield client
    finally:
      client.close()
