# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts one server process a pod on this machine, watches and stops them.

They start while the client imports TensorFlow, as they do. Each has cores of
its own, as many as any other: how a sum is divided among threads decides its
last bit, and pods hold the same bits.
"""

import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from typing import BinaryIO

from palm_mtf.cluster.addresses import resolved
from palm_mtf.cluster.device_table import Place, places_of_pods
from palm_mtf.cluster.server_process import ServerSettings
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import PodsConfig
from palm_mtf.errors import UserError

_START_SECS = 120.0
_STOP_SECS = 5.0
# How long after a broken connection the process at its end may still be there.
_DEATH_SECS = 2.0
_LAST_LINES = 3


@dataclasses.dataclass
class _Server:
  """One pod's process, what it writes to stderr, and its address once known."""

  settings: ServerSettings
  process: subprocess.Popen
  log: BinaryIO
  address: str = ""


def cores_of_pods(num_pods: int) -> list[list[int]]:
  """Returns the cores of each pod, equally many, apart as far as there are.

  What is left over when the cores of this process are divided is the client's.
  """
  cores = sorted(os.sched_getaffinity(0))
  share = max(1, len(cores) // num_pods)
  return [
    [cores[(pod * share + i) % len(cores)] for i in range(share)]
    for pod in range(num_pods)
  ]


def cluster_places(pods: PodsConfig, mesh: MeshLayout) -> list[list[Place]]:
  """Returns the devices of each pod of a cluster, in mesh order.

  Raises:
    UserError: ISLANDS does not make these pods, or a host has no address.
  """
  client, _, _ = pods.client_address.partition(":")
  return resolved(places_of_pods(pods, mesh), client)


class PodServers:
  """The server processes of a run's pods; none where pods are in process.

  A context manager. When it is left, and when this process ends in any other
  way, they are stopped.
  """

  def __init__(self, pods: PodsConfig, mesh: MeshLayout):
    """Starts them, for pods of `mesh`, and does not wait."""
    self._pods, self._mesh = pods, mesh
    self._start()

  def __enter__(self) -> "PodServers":
    return self

  def __exit__(self, *unused: object) -> None:
    for server in self._servers:
      server.process.stdin.close()
    for server in self._servers:
      _stop(server)

  def remove(self, pod: int) -> PodsConfig:
    """Returns the other pods; those after it move up.

    Servers of ours are started anew, each with the cores that fewer have.
    """
    pods = self._pods
    self._pods = dataclasses.replace(
      pods,
      num_pods=pods.num_pods - 1,
      islands=[x for i, x in enumerate(pods.islands) if i != pod],
    )
    for server in self._servers:
      _stop(server)
    self._start()
    return self._pods

  def start_anew(self, pod: int) -> None:
    """Stops a pod's server, if it is ours, and starts another in its place."""
    if self._servers:
      _stop(self._servers[pod])
      self._servers[pod] = _start(self._servers[pod].settings)

  def places(self) -> list[list[Place]]:
    """Returns the devices of each pod, in mesh order; waits for the servers.

    Of pods in process there are none.

    Raises:
      UserError: a server has ended, or does not answer.
    """
    if self._pods.pods == "cluster":
      return cluster_places(self._pods, self._mesh)
    end = time.monotonic() + _START_SECS
    addresses = [
      self._address(pod, end - time.monotonic())
      for pod in range(len(self._servers))
    ]
    numbers = range(self._mesh.num_devices)
    return [[Place(address, i) for i in numbers] for address in addresses]

  def name(self, pod: int, address: str) -> str:
    """Returns what messages call a pod's server, which has an address."""
    if not self._servers:
      return address
    return f"{address} (process {self._servers[pod].process.pid})"

  def find_ended(self) -> tuple[int, str] | None:
    """Returns a pod whose server has ended, or is about to, and how it did."""
    end = time.monotonic() + _DEATH_SECS
    while self._servers and time.monotonic() < end:
      for pod, server in enumerate(self._servers):
        if server.process.poll() is not None:
          return pod, self._how_it_ended(pod)
      time.sleep(_DEATH_SECS / 100)
    return None

  def _start(self) -> None:
    self._servers: list[_Server] = []
    if self._pods.pods != "local_servers":
      return
    for cores in cores_of_pods(self._pods.num_pods):
      settings = ServerSettings(
        client=os.getpid(), num_devices=self._mesh.num_devices, cores=cores
      )
      self._servers.append(_start(settings))

  def _address(self, pod: int, secs: float) -> str:
    server = self._servers[pod]
    if server.address:
      return server.address
    output = server.process.stdout
    ready, _, _ = select.select([output], [], [], max(0.0, secs))
    if not ready:
      raise UserError(
        f"pod {pod}: its server (process {self._servers[pod].process.pid}) has "
        f"not started in {_START_SECS:.0f} seconds."
      )
    if line := output.readline():
      server.address = json.loads(line)["address"]
      return server.address
    process = self._servers[pod].process
    process.wait()
    raise UserError(
      f"pod {pod}: its server (process {process.pid}) "
      f"{self._how_it_ended(pod)}, at its start."
    )

  def _how_it_ended(self, pod: int) -> str:
    server = self._servers[pod]
    code = server.process.returncode
    how = f"exited with {code}"
    if code < 0:
      how = f"was killed by {signal.Signals(-code).name}"
    server.log.seek(0)
    lines = server.log.read().decode(errors="replace").splitlines()
    last = " / ".join(lines[-_LAST_LINES:]) if code > 0 else ""
    return f"{how}{last and f' ({last})'}"


def _stop(server: _Server) -> None:
  """Ends a server: one that does not hear is killed."""
  server.process.stdin.close()
  try:
    server.process.wait(_STOP_SECS)
  except subprocess.TimeoutExpired:
    server.process.kill()
    server.process.wait()
  server.process.stdout.close()
  server.log.close()


def _start(settings: ServerSettings) -> _Server:
  log = tempfile.TemporaryFile()
  path = os.pathsep.join(folder for folder in sys.path if folder)
  process = subprocess.Popen(
    [sys.executable, "-m", "palm_mtf.cluster.server_process"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=log,
    env={**os.environ, "PYTHONPATH": path},
  )
  line = json.dumps(dataclasses.asdict(settings)) + "\n"
  process.stdin.write(line.encode())
  process.stdin.flush()
  return _Server(settings, process, log)
