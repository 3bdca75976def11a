# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The accelerators of pods, and the hosts that hold them.

Each host runs one process, in which JAX opens the host's devices. If
JAX_PLATFORMS is "cpu", virtual CPU devices take the place of the accelerators,
so that the programs of a recipe for TPUs run on any machine.
"""

import contextlib
import dataclasses
import secrets
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import jax
from jaxlib import _jax

from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.config.tpu_slice import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.executors.xla.host_calls import CoordinatorSettings, HostSettings
from palm_mtf.executors.xla.tpu_places import TpuPlace, host_places, tpu_places
from palm_mtf.json_text import dataclass_text
from palm_mtf.machine.processors import is_rehearsal
from palm_mtf.runtime.addresses import (
  ANY_ADDRESS,
  explain_start_error,
  is_loopback,
  resolve,
)
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.server.restricted_port import (
  restrict_later_listeners,
  restricted_port,
)

_JAX = "0.10."  # other versions may lack interfaces that parts.py uses
_EXTRAS = {"tpu": "tpu", "gpu": "cuda12", "cpu": "test"}

# (number of this host in its pod, number of hosts) since JAX's start in this
# process; None before. JAX cannot change either while the process runs.
_started: tuple[int, int] | None = None
# "host:port" of the coordinator of these hosts; "" if there is one host.
_joined = ""


@dataclasses.dataclass(frozen=True)
class PodName:
  """Name of a pod's stage in its hosts' processes, which hold its arrays.

  A pod without stages has stage 0.
  """

  client: str  # name of the client, which owns the arrays
  # Number among all stages of the client's pods that this process holds.
  number: int
  num_hosts: int  # of the stage
  stage: int = 0  # number in its pod; 0 in a pod without stages


@dataclasses.dataclass(frozen=True)
class AcceleratorDevices:
  """The accelerators of all pods; the client knows only their hosts."""

  client: str  # CPU of the client process
  # Processes of the hosts of each pod's stages, in the order of the hosts; all
  # stages of the first pod, then those of the second pod.
  hosts: Sequence[Sequence[Process]]
  places: Sequence[int]  # for each device of a mesh, the number of its host
  num_stages: int = 1  # number of stages of each pod
  # `hosts` of the pods before the first of these.
  before: Sequence[Sequence[Process]] = ()
  # Name of the client, under which hosts keep its arrays; no two clients of a
  # host have the same name.
  name: str = dataclasses.field(
    default_factory=lambda: f"client_{secrets.token_hex(4)}"
  )

  @property
  def pods(self) -> list[list[str]]:
    """For each pod, the CPU of each device's host: by stage, then by place."""
    every, n = self.hosts, self.num_stages
    return [
      [hosts[x].device for hosts in every[i : i + n] for x in self.places]
      for i in range(0, len(every), n)
    ]

  @property
  def first_pod(self) -> int:
    """Number of the first of these pods among all pods of the run."""
    return len(self.before) // self.num_stages

  def of_pod(self, pod: int) -> "AcceleratorDevices":
    """Returns the accelerators of one pod."""
    first = pod * self.num_stages
    return dataclasses.replace(
      self,
      hosts=self.hosts[first : first + self.num_stages],
      before=self.hosts[:first],
    )

  def hosts_of(self, pod: int, stage: int = 0) -> Sequence[Process]:
    """Returns the processes of the hosts of a pod's stage."""
    return self.hosts[pod * self.num_stages + stage]

  @property
  def num_local(self) -> int:
    """Number of devices of each host."""
    return len(self.places) // len(self.hosts[0])

  def name_pod(self, pod: int, stage: int = 0) -> str:
    """Returns the `PodName` of a pod's stage as JSON."""
    hosts, before = self.hosts_of(pod, stage), pod * self.num_stages + stage
    earlier = [*self.before, *self.hosts[:before]]
    number = sum(x[0] is hosts[0] for x in earlier)
    return dataclass_text(PodName(self.name, number, len(hosts), stage))


# JAX's coordination service that this process has started, the service's port,
# and how many hosts it joins.
_coordinator: tuple[Any, int, int] | None = None


def open_coordinator(given: CoordinatorSettings) -> int:
  """Starts JAX's coordination service in this process; returns its port.

  JAX itself would let the service listen on every address of this host, for
  every user: whoever reaches it can abort all hosts of the pod. Here only users
  of this process's TensorFlow server may connect to the service.

  Raises UserError if the port is taken, the system cannot limit who may
  connect, or this process has a coordinator at another port or of another pod
  size, or is another host of a pod.
  """
  global _coordinator
  if _coordinator:
    # Processes of a pod stay connected to their coordinator until they end, so
    # later clients, such as a resumed run, must use the same coordinator.
    _, port, num_hosts = _coordinator
    if given.port not in (0, port):
      raise UserError(
        f"its coordinator listens at port {port}, and COORDINATOR_PORT asks "
        f"for {given.port}; start its server again."
      )
    if num_hosts == given.num_hosts:
      return port
    raise UserError(
      f"it coordinates {num_hosts} hosts and cannot coordinate "
      f"{given.num_hosts}; start its server again."
    )
  _check_role(0, given.num_hosts)  # raise before a port is opened
  ip = resolve("ISLANDS", given.host)
  try:
    with restricted_port(ip, given.port) as port:
      service = _jax.get_distributed_runtime_service(
        f"[::]:{port}"
        if socket.has_dualstack_ipv6()
        else f"{ANY_ADDRESS}:{port}",
        given.num_hosts,
      )
  except (OSError, RuntimeError) as error:
    raise explain_start_error(f"{ip}:{given.port}", error) from None
  _coordinator = service, port, given.num_hosts
  return port


@contextlib.contextmanager
def _coordinator_is_open() -> Iterator[None]:
  """In the `with` body, JAX uses `_coordinator` instead of starting another."""
  service, _, _ = _coordinator
  start = _jax.get_distributed_runtime_service
  _jax.get_distributed_runtime_service = lambda *_, **unused: service
  try:
    yield
  finally:
    _jax.get_distributed_runtime_service = start


def _check_role(number: int, num_hosts: int) -> None:
  """Raises UserError if this process is already another host of a pod."""
  if _started and _started != (number, num_hosts):
    raise UserError(
      f"it was host {_started[0]} of {_started[1]} and cannot become host "
      f"{number} of {num_hosts}; start its server again."
    )


def check_host(host: HostSettings) -> bool:
  """Returns whether a process has already joined the other hosts of a pod.

  Starts nothing.

  Raises UserError if this process is already another host of a pod, a host of
  another pod size, or has joined other hosts.
  """
  _check_role(host.number, host.num_hosts)
  if _started and host.coordinator != _joined:
    # The hosts would wait for each other without end in their first collective.
    raise UserError(
      f"it has joined the hosts of {_joined} and cannot join those of "
      f"{host.coordinator}; start its server again."
    )
  return _started is not None


def start_host(host: HostSettings) -> None:
  """Starts JAX on a host of a pod.

  Raises UserError as `check_host` does, and if the host does not have the
  devices that the mesh needs.
  """
  global _started, _joined
  check_host(host)
  if host.num_hosts > 1 and not _started:
    if is_rehearsal():
      _make_virtual_devices(host.mesh_layout.num_devices // host.num_hosts)
    address, _, _ = host.coordinator.rpartition(":")
    if is_loopback(resolve("ISLANDS", address)):
      restrict_later_listeners()
    opened = contextlib.nullcontext() if host.number else _coordinator_is_open()
    with opened:
      jax.distributed.initialize(host.coordinator, host.num_hosts, host.number)
  _started, _joined = (host.number, host.num_hosts), host.coordinator
  last = host.num_stages - 1
  devices = find_devices(host.mesh_layout, host.num_hosts, last)
  numbers = host_of_devices(host.mesh_layout, host.num_hosts)
  here = {
    number
    for number, x in zip(numbers, devices, strict=True)
    if x.process_index == jax.process_index()
  }
  if here != {host.number}:
    raise UserError(
      f"it has the devices of host {min(here)}, and ISLANDS lists it as host "
      f"{host.number}; list the servers in the order of the slice's workers."
    )


def host_of_devices(mesh: DeviceMesh, num_hosts: int) -> list[int]:
  """Returns the number of each device's host, in the order of the mesh."""
  if is_rehearsal() or not mesh.tpu:
    return [i * num_hosts // mesh.num_devices for i in range(mesh.num_devices)]
  where = tpu_slice(mesh.tpu)
  hosts = {
    place: number
    for number, places in enumerate(host_places(where))
    for place in places
  }
  return [hosts[x] for x in tpu_places(where, list(mesh.axes.values())[-1])]


def find_devices(
  mesh: DeviceMesh, num_hosts: int = 1, pod: int = 0
) -> list[Any]:
  """Returns JAX's devices of a pod, in the order of the mesh.

  Args:
    pod: number of the stage among all stages of pods of this process, which
      share no devices.

  Raises UserError if JAX has another version, or finds no devices of this kind,
  too few devices, or another TPU slice.
  """
  if not jax.__version__.startswith(_JAX):
    raise UserError(
      f"JAX {jax.__version__}: palm_mtf computes on accelerators with JAX "
      f"{_JAX}x; pip install 'jax=={_JAX}*'"
    )
  kind = platform_of(mesh)
  given = (
    f'TPU = "{mesh.tpu}"' if mesh.tpu else f"MESH_SHAPE = {mesh.mesh_shape!r}"
  )
  if kind == "cpu":
    _make_virtual_devices((pod + 1) * mesh.num_devices // num_hosts)
  try:
    found = jax.devices(kind)
  except RuntimeError as error:
    raise UserError(
      f"{given}: JAX finds no {kind.upper()} on this machine "
      f"({first_line(error)}); install palm_mtf[{_EXTRAS[kind]}], or set "
      "JAX_PLATFORMS=cpu to rehearse the run on virtual CPU devices."
    ) from None
  if kind == "tpu":
    if pod:
      raise UserError(
        f"{given}: a process has the TPUs of one slice, and NUM_PODS x STAGES "
        "is more; give each of them servers in ISLANDS."
      )
    return order_tpus(mesh, found)
  by_host = [
    [x for x in found if x.process_index == i] for i in range(num_hosts)
  ]
  share = mesh.num_devices // num_hosts
  # A server keeps the number of virtual devices that its first run has made.
  again = "start its server again, " if kind == "cpu" else ""
  for devices in by_host:
    if len(devices) < (pod + 1) * share:
      raise UserError(
        f"{given}: the mesh takes {share} devices of a host, and JAX finds "
        f"{len(devices)} {kind.upper()} devices for {pod + 1} pods or stages; "
        f"give a smaller mesh, {again}or fewer pods or stages."
      )
  left = [iter(x[pod * share :]) for x in by_host]
  return [next(left[x]) for x in host_of_devices(mesh, num_hosts)]


def order_tpus(mesh: DeviceMesh, found: Sequence[Any]) -> list[Any]:
  """Puts `found`, JAX's devices of a TPU slice, in the order of the mesh.

  Raises UserError if `found` are not the devices of the slice.
  """
  where = tpu_slice(mesh.tpu)
  by_place = {TpuPlace(*x.coords, x.core_on_chip): x for x in found}
  places = tpu_places(where, list(mesh.axes.values())[-1])
  if by_place.keys() != {*places}:
    last = [max(x) + 1 for x in zip(*by_place, strict=True)]
    raise UserError(
      f'TPU = "{where.name}" has {where.mesh_shape} devices along (x, y, z, '
      f"core), but JAX finds {tuple(last)}; set TPU to the slice of that shape."
    )
  return [by_place[x] for x in places]


def platform_of(mesh: DeviceMesh) -> str:
  """Returns JAX's name of the kind of devices: "tpu", "gpu" or "cpu"."""
  if is_rehearsal():
    return "cpu"
  return "tpu" if mesh.tpu else "gpu"


def lowering_platform(devices: Sequence[Any]) -> str:
  """Returns the kind of devices as lowered programs name it: "cuda", ..."""
  kind = devices[0].platform
  return "cuda" if kind == "gpu" else kind


def _make_virtual_devices(num: int) -> None:
  if jax.config.jax_num_cpu_devices < num:
    # JAX creates its CPU devices once per process, and later refuses to change
    # their number. Ignore this error, because the caller checks the number.
    with contextlib.suppress(RuntimeError):
      jax.config.update("jax_num_cpu_devices", num)


def first_line(error: Exception) -> str:
  """Returns the first line of an error's message; its type if it has none."""
  return (str(error).splitlines() or [type(error).__name__])[0]
