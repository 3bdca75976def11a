# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts JAX on the hosts of pods of accelerators, all at the same time."""

import collections
import concurrent.futures
from collections.abc import Callable, Iterator, Sequence

from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.errors import UserError
from palm_mtf.executors.xla.devices import AcceleratorDevices, host_of_devices
from palm_mtf.executors.xla.host_calls import (
  JOINED,
  NEW,
  CoordinatorSettings,
  HostSettings,
  check_host,
  open_coordinator,
  start_host,
)
from palm_mtf.json_text import dataclass_text
from palm_mtf.runtime.client.pod_hosts import PodHosts
from palm_mtf.runtime.server_info import NoAnswerError, call_function

# Seconds within which JAX has to start the accelerators of a host.
_START_SECS = 300.0
_HostFunction = Callable[[bytes], bytes]
# Number of the pod, address of the server.
_Host = tuple[int, str, HostSettings]


def start_hosts(
  mesh: MeshLayout, pods: PodsConfig, hosts: PodHosts
) -> AcceleratorDevices:
  """Starts JAX on all hosts of all pods; returns the devices.

  Raises UserError if a host's devices are not those that the mesh needs, or if
  JAX does not start on a host.
  """

  settings = list(_make_settings(mesh, pods, hosts))
  _check_hosts(hosts, [x for x in settings if x[2].num_hosts > 1])
  started = _call_all(hosts, start_host, settings)
  _raise_problems(settings, started, expected=("",))
  stages = _split(mesh, hosts)
  return AcceleratorDevices(
    hosts.client,
    [[hosts.processes[pod][y] for y in x] for pod, x in stages],
    host_of_devices(mesh, len(stages[0][1])),
    mesh.stages,
    name=hosts.name,
  )


def _check_hosts(hosts: PodHosts, settings: Sequence[_Host]) -> None:
  """Raises UserError if the hosts of a stage cannot join one another.

  JAX ends the hosts that have joined if another host joins them later.
  """
  found = _call_all(hosts, check_host, settings)
  _raise_problems(settings, found, expected=(JOINED, NEW))
  stages: dict[str, dict[str, list[str]]] = {}  # by the coordinator
  for (pod, address, host), state in zip(settings, found, strict=True):
    names = stages.setdefault(host.coordinator, {JOINED: [], NEW: []})
    names[state].append(address)
    if names[JOINED] and names[NEW]:
      raise UserError(
        f"pod {pod}: the server {names[JOINED][0]} was a host of another run, "
        f"and {names[NEW][0]} was not, so they cannot join; start all servers "
        "of this pod again."
      )


def _raise_problems(
  settings: Sequence[_Host], found: Sequence[str], expected: tuple[str, ...]
) -> None:
  for (pod, address, _), text in zip(settings, found, strict=True):
    if text not in expected:
      raise UserError(f"pod {pod}: the server {address}: {text}")


def _call_all(
  hosts: PodHosts, function: _HostFunction, settings: Sequence[_Host]
) -> list[str]:
  """Calls a function on hosts, all at once; returns the results."""

  def call(host: _Host) -> str:
    pod, address, given = host
    return _call(hosts, pod, address, function, dataclass_text(given))

  # JAX on one host starts only when the other hosts of the stage start too.
  with concurrent.futures.ThreadPoolExecutor(len(settings) or 1) as threads:
    return [*threads.map(call, settings)]


def _split(mesh: MeshLayout, hosts: PodHosts) -> list[tuple[int, list[str]]]:
  """Returns (pod, addresses of the servers) of each stage of each pod.

  Either all stages of a pod have the same number of servers, or all servers
  have the same number of stages.

  Raises UserError if the numbers of servers and stages allow neither.
  """
  made = []
  for pod, processes in enumerate(hosts.processes):
    addresses, stages = [*processes], mesh.stages
    if len(addresses) % stages and stages % len(addresses):
      raise UserError(
        f"ISLANDS: pod {pod} has {len(addresses)} servers and STAGES = "
        f"{stages}: on accelerators either divides the other; give each stage "
        "as many servers."
      )
    share = max(1, len(addresses) // stages)
    for stage in range(stages):
      first = stage * len(addresses) // stages
      made.append((pod, addresses[first : first + share]))
  return made


def _make_settings(
  mesh: MeshLayout, pods: PodsConfig, hosts: PodHosts
) -> Iterator[_Host]:
  """Yields (pod, address, settings) of each host.

  Opens the port of JAX's coordinator on the first host of each stage that has
  several hosts.
  """
  port, stages = pods.coordinator_port, _split(mesh, hosts)
  held = collections.Counter(x for _, addresses in stages for x in addresses)
  for stage, (pod, addresses) in enumerate(stages):
    coordinator = ""
    if len(addresses) > 1:
      first = addresses[0]
      host = first.partition(":")[0]
      # Stages whose first hosts are on one machine need different ports.
      wanted = CoordinatorSettings(
        host=host, port=port and port + stage, num_hosts=len(addresses)
      )
      text = dataclass_text(wanted)
      found = _call(hosts, pod, first, open_coordinator, text)
      if not found.isdigit():
        raise UserError(f"pod {pod}: the server {first}: {found}")
      coordinator = f"{host}:{found}"
    for number, address in enumerate(addresses):
      settings = HostSettings(
        mesh_layout=mesh,
        number=number,
        num_hosts=len(addresses),
        num_stages=held[address],
        coordinator=coordinator,
      )
      yield pod, address, settings


def _call(
  hosts: PodHosts, pod: int, address: str, function: _HostFunction, text: str
) -> str:
  info = hosts.infos[address]
  try:
    return call_function(address, info, function, text, _START_SECS)
  except NoAnswerError as error:
    raise UserError(
      f"pod {pod}: the server {address}: {error}, while JAX started; maybe "
      "another process there holds the accelerators, or the hosts of the pod "
      "cannot reach each other. End that process or open the hosts' ports, "
      "and start the servers again."
    ) from None
