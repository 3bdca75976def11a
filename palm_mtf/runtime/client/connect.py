# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Connects to the devices of pods, in this process or on TensorFlow servers.

A pod is a group of devices, such as those of a copy of the model. Pod i is
TensorFlow's job "pod_<i>", with one task per server. The client is a job with a
name that no other client has.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import ClassVar

from palm_mtf._tf import tf
from palm_mtf.config import PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.json_text import dataclass_text
from palm_mtf.machine.host_memory import resident_bytes
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.mesh.session import session_config
from palm_mtf.runtime.addresses import resolve
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.heartbeat import Heartbeat, PodLostError
from palm_mtf.runtime.client.local_servers import PodServers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.client.pod_hosts import PodHosts, Starter
from palm_mtf.runtime.client.turns import ManagedTurns
from palm_mtf.runtime.manager.client import Stream
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.program import Program
from palm_mtf.runtime.server.clients import (
  Registration,
  join_server,
  leave_server,
)
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import (
  NoAnswerError,
  ServerInfo,
  call_function,
  read_incarnation,
)

_POD = re.compile(r"/job:(pod_\d+)/")
# Seconds to wait for a session to close, normally and after a pod was lost. A
# session never closes if one of its servers has ended.
_CLOSE_SECS = 10.0
_CLOSE_LOST_SECS = 1.0
_NUM_THREADS = 64  # to call servers; each call may wait for a timeout


@dataclasses.dataclass(frozen=True)
class Membership:
  """Registers a client with servers, which free its memory once it is gone."""

  client: Registration  # name and address, by which servers watch the client
  infos: Mapping[str, ServerInfo]  # {server's address: its info}

  # For each server's address, the names of this process's clients that have
  # ended but got no answer when they left that server. The server may still
  # hold their memory, so the next client that joins reports the names.
  _ended: ClassVar[dict[str, set[str]]] = collections.defaultdict(set)

  def join(self) -> None:
    """Registers with servers that answer; the heartbeat reports silent ones."""
    self._call_each(self._join)

  def leave(self, secs: float) -> None:
    """Tells servers to free the client's memory; waits up to `secs` seconds."""
    self._call_each(functools.partial(self._leave, secs))

  def _call_each(self, function: Callable[[str], None]) -> None:
    with concurrent.futures.ThreadPoolExecutor(_NUM_THREADS) as threads:
      list(threads.map(function, self.infos))

  def _join(self, address: str) -> None:
    ended = self._ended[address]
    client = dataclasses.replace(self.client, ended=sorted(ended))
    text = dataclass_text(client)
    info, secs = self.infos[address], client.secs
    with contextlib.suppress(NoAnswerError):
      while True:
        try:
          call_function(address, info, join_server, text, secs)
          ended.clear()
          return
        except NoAnswerError:
          # Retry if the server answers this call, as it does even when busy. A
          # lost server raises NoAnswerError here, which ends the loop.
          read_incarnation(address, secs)

  def _leave(self, secs: float, address: str) -> None:
    info, name = self.infos[address], self.client.name
    try:
      call_function(address, info, leave_server, name, secs)
    except NoAnswerError:
      self._ended[address].add(name)


@dataclasses.dataclass(frozen=True)
class Cluster:
  """The devices of a run, and the settings of a session that uses them."""

  devices: Devices
  config: tf.ConfigProto
  # Frees what the executor holds in this process outside of a session.
  release: Callable[[], None] = lambda: None
  target: str = ""  # TensorFlow's target, "grpc://..."; "" is this process
  servers: Sequence[Process] = ()  # of all pods; () if this process has all
  # {TensorFlow's name of a device: the manager's name, "host:port/number"}.
  names: Mapping[str, str] = dataclasses.field(default_factory=dict)
  stream: Stream | None = None  # to the manager that orders clients' programs
  membership: Membership | None = (
    None  # makes servers that outlive the client free its memory
  )

  @contextlib.contextmanager
  def client(self, reserved: int = 0) -> Iterator[Client]:
    """Opens a client of the devices; closes it within a time limit.

    `reserved` is the bytes per device that a manager does not give to buffers
    of any client, because this client needs them for itself.
    """
    if self.membership:
      self.membership.join()
    client = Client(tf.Session(self.target, tf.Graph(), self.config))
    secs, turns = _CLOSE_SECS, None
    if self.stream:
      turns = ManagedTurns(self.stream, self.names, reserved)
      client.take_turn, client.free = turns.take, turns.free
    try:
      yield client
    except PodLostError:
      secs = _CLOSE_LOST_SECS
      raise
    finally:
      client.close(secs)
      if turns:
        turns.close()
      if self.membership:
        self.membership.leave(secs)
      self.release()


def connect(
  starter: Starter,
  pods: PodsConfig,
  mesh: DeviceMesh,
  places: Sequence[Sequence[Place]],
  infos: Mapping[str, ServerInfo],
  stream: Stream | None = None,
) -> Cluster:
  """Returns the cluster of a run; raises UserError if devices are missing.

  Args:
    places: each pod's devices on servers; empty if this process has all pods.
    infos: info of each server, by the server's address.
    stream: opens a stream to the manager; None without a manager.
  """
  if not places:
    return Cluster(*starter.open_here(mesh, pods.num_pods))
  # The client runs a server too. The client's session sends every server the
  # jobs and addresses of all servers, because a server knows only its own port.
  host, _, port = pods.client_address.partition(":")
  ip = resolve("CLIENT_ADDRESS", host)
  target = _client_server(1, 0, (ip, int(port or 0))).target
  config = session_config(1)
  # Make servers free the variables of a session when the session ends.
  config.isolate_session_state = True
  # If two clients had the same name, a server would take the second client for
  # a restart of the first, and delete the first client's session.
  name = f"client_{secrets.token_hex(4)}"
  client_address = f"{ip}:{target.rpartition(':')[2]}"
  config.cluster_def.job.add(name=name).tasks[0] = client_address
  devices, names = [], {}
  hosts: list[dict[str, Process]] = []
  for pod, devices_of_pod in enumerate(places):
    tasks = list(dict.fromkeys(place.address for place in devices_of_pod))
    job = config.cluster_def.job.add(name=f"pod_{pod}")
    hosts.append({})
    for task, address in enumerate(tasks):
      job.tasks[task] = address
      cpu = f"/job:pod_{pod}/task:{task}/device:cpu:0"
      hosts[-1][address] = Process(cpu, infos[address].functions)
    of_pod = {
      f"/job:pod_{pod}/task:{tasks.index(x.address)}/device:cpu:{x.device}": x
      for x in devices_of_pod
    }
    devices.append([*of_pod])
    names |= {x: f"{y.address}/{y.device}" for x, y in of_pod.items()}
  client = f"/job:{name}/task:0/device:cpu:0"
  held = starter.start(
    mesh, pods, PodHosts(name, client, hosts, devices, infos)
  )
  cluster = Cluster(held, config, target=target, names=names, stream=stream)
  membership = None
  if pods.pods == "cluster":  # servers outlive the client and free its memory
    secs = pods.pod_timeout_secs
    registration = Registration(
      name=name,
      address=client_address,
      incarnation=read_incarnation(client_address, secs),
      secs=secs,
    )
    membership = Membership(registration, infos)
  servers = [x for of_pod in hosts for x in of_pod.values()]
  return dataclasses.replace(cluster, servers=servers, membership=membership)


# All clients of a process share a server: TensorFlow cannot stop a server.
_client_server = functools.cache(start_server)


def memory_reader(
  client: Client, servers: Sequence[Process]
) -> Callable[[], dict[str, int]]:
  """Returns a function that reads how much host memory the pods' servers use.

  It returns {metric name of a pod: resident bytes of the pod's server that uses
  most}, and raises OpError if a server is lost. `servers` may be empty.
  """
  values: dict[str, list[tf.Tensor]] = {}  # one per server, by metric name
  with client.graph.as_default():
    for server in servers:
      (pod,) = _POD.findall(server.device)
      read = server.call(resident_bytes, [], [tf.int64])
      values.setdefault(f"host_memory_bytes/{pod}", []).extend(read)
  program = Program(outputs=values)
  return lambda: {k: int(max(x)) for k, x in client.call(program).items()}


@contextlib.contextmanager
def open_pod(
  starter: Starter, mesh: DeviceMesh, pods: PodsConfig
) -> Iterator[tuple[Client, Devices]]:
  """Opens a client of one pod, as for decoding; yields client and devices.

  The pod has the axes of `mesh`. If ISLANDS names servers, it is the first pod
  of ISLANDS; otherwise this process has the devices. Raises UserError if
  devices or servers are missing, or if a server is lost while the client is
  open.
  """
  here = PodsConfig(pod_timeout_secs=pods.pod_timeout_secs)
  first = dataclasses.replace(pods, num_pods=1, islands=pods.islands[:1])
  pods = first if pods.has_islands else here
  with PodServers(pods, mesh) as servers:
    places, secs = starter.find_places(servers.places()), pods.pod_timeout_secs
    with Heartbeat(servers, places, secs, starter) as heartbeat:
      cluster = connect(starter, pods, mesh, places, heartbeat.infos)
      with (
        heartbeat.during("while it ran the model"),
        cluster.client() as client,
      ):
        heartbeat.connect(client)
        yield client, cluster.devices
