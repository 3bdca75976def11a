# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts, watches and stops server processes on this machine.

There is one server per pod; if pods have stages, one per stage.
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
from collections.abc import Sequence
from typing import BinaryIO

from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.json_text import dataclass_text
from palm_mtf.machine.process import make_child_environment
from palm_mtf.runtime.client.places import (
  ManagedPlaces,
  Place,
  cluster_places,
  pod_slices,
)
from palm_mtf.runtime.manager.client import Stream
from palm_mtf.runtime.server.process import ServerSettings

_START_SECS = 120.0
_STOP_SECS = 5.0
# When a server dies, calls to the server fail before its process has ended. To
# report the exit code, wait up to this many seconds for that end.
_DEATH_SECS = 2.0
_LAST_LINES = 3  # of a server's stderr, shown in messages


@dataclasses.dataclass
class _Server:
  pod: int
  settings: ServerSettings
  process: subprocess.Popen
  log: BinaryIO  # the process's stderr
  address: str = ""  # "" until the server has printed it


def cores_of_pods(num_pods: int) -> list[list[int]]:
  """Returns the numbers of each pod's CPU cores.

  Pods share cores only if there are fewer cores than pods. If pods have stages,
  each stage counts as a pod here.
  """
  # All pods get equally many cores, because the last bit of a sum depends on
  # the number of threads, and all pods must compute the same bits. Cores that
  # are left over stay free for the client.
  cores = sorted(os.sched_getaffinity(0))
  share = max(1, len(cores) // num_pods)
  return [
    [cores[(pod * share + i) % len(cores)] for i in range(share)]
    for pod in range(num_pods)
  ]


class PodServers:
  """The servers of a run's pods; a context manager.

  PODS = "local_servers" starts and stops the servers. With "cluster", servers
  already run where ISLANDS or the manager says.
  """

  def __init__(
    self, pods: PodsConfig, mesh: DeviceMesh, modules: Sequence[str] = ()
  ):
    # Start servers now, so that they import TensorFlow while the client does.
    # They also import `modules`, whose functions the client calls there.
    self._pods, self._mesh, self._modules = pods, mesh, modules
    # Meshes of devices that a manager allocates; None without a manager.
    self.managed = ManagedPlaces(pods) if pods.is_managed else None
    self._start()

  def __enter__(self) -> "PodServers":
    return self

  def __exit__(self, *unused: object) -> None:
    if self.managed:
      self.managed.close()
    for server in self._servers:
      server.process.stdin.close()  # tells each server to end, without waiting
    for server in self._servers:
      _stop(server)

  def remove(self, pod: int) -> PodsConfig:
    """Drops a lost pod and renumbers later pods; returns the new settings."""
    pods, islands = self._pods, self._pods.islands
    if self.managed:
      self.managed.avoid(pod)
    else:
      islands = [x for i, x in enumerate(islands) if i != pod]
    self._pods = dataclasses.replace(
      pods, num_pods=pods.num_pods - 1, islands=islands
    )
    # Restart all servers, because with fewer servers each gets more cores.
    for server in self._servers:
      _stop(server)
    self._start()
    return self._pods

  def restart(self, pod: int) -> None:
    """Restarts a pod's servers, or makes the manager choose other servers."""
    if self.managed:
      self.managed.avoid(pod)
    for i, server in enumerate(self._servers):
      if server.pod == pod:
        _stop(server)
        self._servers[i] = _start(pod, server.settings)

  def places(self) -> list[list[Place]]:
    """Returns pods' devices once servers run; UserError if a server fails."""
    if self.managed:
      shapes = pod_slices(self._pods, self._mesh)
      return self.managed.bind(shapes, self._mesh.stages)
    if self._pods.pods == "cluster":
      return cluster_places(self._pods, self._mesh)
    end = time.monotonic() + _START_SECS
    places: dict[int, list[Place]] = {}
    for server in self._servers:
      address = _read_address(server, end - time.monotonic())
      of_pod = places.setdefault(server.pod, [])
      of_pod += [Place(address, i) for i in range(self._mesh.num_devices)]
    return [*places.values()]

  @property
  def stream(self) -> Stream | None:
    """Opens a stream to the manager, which orders programs; or None."""
    return self.managed.stream if self.managed else None

  def must_move(self) -> bool:
    """Returns whether the manager would now give the run other devices."""
    return bool(self.managed) and self.managed.must_move()

  def name(self, address: str) -> str:
    """Returns an address, with its process id if known, for messages."""
    for server in self._servers:
      if server.address == address:
        return f"{address} (process {server.process.pid})"
    return address

  def find_ended(self) -> tuple[str, str] | None:
    """Waits up to 2 seconds for a server to end, to explain a failed call.

    Returns the server's address and how the server ended; None if none ended.
    """
    end = time.monotonic() + _DEATH_SECS
    while self._servers and time.monotonic() < end:
      for server in self._servers:
        if server.process.poll() is not None:
          return server.address, _describe_end(server)
      time.sleep(_DEATH_SECS / 100)
    return None

  def _start(self) -> None:
    self._servers: list[_Server] = []
    if self._pods.pods != "local_servers":
      return
    stages = self._mesh.stages
    for i, cores in enumerate(cores_of_pods(stages * self._pods.num_pods)):
      settings = ServerSettings(
        client=os.getpid(),
        num_devices=self._mesh.num_devices,
        modules=self._modules,
        cores=cores,
      )
      self._servers.append(_start(i // stages, settings))


def _read_address(server: _Server, secs: float) -> str:
  """Waits up to `secs` seconds until a server has printed its address."""
  if server.address:
    return server.address
  process = server.process
  ready, _, _ = select.select([process.stdout], [], [], max(0.0, secs))
  if not ready:
    raise UserError(
      f"pod {server.pod}: its server (process {process.pid}) has not started "
      f"in {_START_SECS:.0f} seconds."
    )
  if line := process.stdout.readline():
    server.address = json.loads(line)["address"]
    return server.address
  process.wait()  # stdout has ended without an address
  raise UserError(
    f"pod {server.pod}: its server (process {process.pid}) "
    f"{_describe_end(server)}, at its start."
  )


def _describe_end(server: _Server) -> str:
  code = server.process.returncode
  if code < 0:
    return f"was killed by {signal.Signals(-code).name}"
  server.log.seek(0)
  lines = server.log.read().decode(errors="replace").splitlines()
  last = " / ".join(lines[-_LAST_LINES:])
  return f"exited with {code}" + (f" ({last})" if code and last else "")


def _stop(server: _Server) -> None:
  server.process.stdin.close()  # tells the server to end
  try:
    server.process.wait(_STOP_SECS)
  except subprocess.TimeoutExpired:
    server.process.kill()
    server.process.wait()
  server.process.stdout.close()
  server.log.close()


def _start(pod: int, settings: ServerSettings) -> _Server:
  log = tempfile.TemporaryFile()
  process = subprocess.Popen(
    [sys.executable, "-m", "palm_mtf.runtime.server.process"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
    stderr=log,
    env=make_child_environment(),
  )
  process.stdin.write(f"{dataclass_text(settings)}\n".encode())
  process.stdin.flush()
  return _Server(pod, settings, process, log)
