# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where pods run: the devices of this process, or of TensorFlow servers.

The client is a server too, named "client", whose session reaches the others;
pod i is named "pod_<i>". Servers are told these names, and of each other, by
the session, so that each need know nothing but the port it has found free. A
pod on several hosts has a task on each.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterator, Sequence

from palm_mtf._tf import tf
from palm_mtf.cluster.addresses import ANY_ADDRESS, is_loopback, resolve
from palm_mtf.cluster.device_table import Place
from palm_mtf.cluster.server_info import publish
from palm_mtf.cluster.sockets import keep_to_address, keep_to_this_machine
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.pods import PodsConfig
from palm_mtf.config.tpu_topology import tpu_slice
from palm_mtf.errors import UserError
from palm_mtf.mesh.host.devices import HostDevices, local_devices
from palm_mtf.mesh.placement import Devices
from palm_mtf.mesh.session import session_config
from palm_mtf.mesh.tpu.devices import tpu_devices

# A session's end waits for servers, which may be there no more.
_CLOSE_SECS = 10.0


@dataclasses.dataclass(frozen=True)
class Cluster:
  """Where a program is placed, and how it is run there.

  Attributes:
    devices: for the program.
    config: for its session.
    target: for its session; "" is this process.
    tpu_jobs: name of each TPU pod's job; None is this process.
  """

  devices: Devices
  config: tf.ConfigProto
  target: str = ""
  tpu_jobs: Sequence[str | None] = ()

  @contextlib.contextmanager
  def session(self) -> Iterator[tf.Session]:
    """Opens a session of the current graph; its end has a bound."""
    session = tf.Session(self.target, config=self.config)
    try:
      for job in self.tpu_jobs:
        session.run(tf.tpu.initialize_system(job=job))
      yield session
    finally:
      closing = threading.Thread(target=session.close, daemon=True)
      closing.start()
      closing.join(_CLOSE_SECS)


def connect(
  pods: PodsConfig, mesh: MeshLayout, places: Sequence[Sequence[Place]]
) -> Cluster:
  """Returns where pods of `mesh` run.

  Args:
    pods: how many.
    mesh: devices and layout rules of each pod.
    places: each pod's devices in servers; none where they are in process.
  """
  if not places:
    if mesh.tpu:
      return tpus_here(mesh)
    return Cluster(
      local_devices(mesh.num_devices, pods.num_pods),
      session_config(mesh.num_devices, pods.num_pods),
    )
  host, _, port = pods.client_address.partition(":")
  ip = resolve("CLIENT_ADDRESS", host)
  target = _client_server(ip, int(port or 0)).target
  config = session_config(1)
  # Variables end with their session.
  config.isolate_session_state = True
  job = config.cluster_def.job.add(name="client")
  job.tasks[0] = f"{ip}:{target.rpartition(':')[2]}"
  devices = []
  for pod, devices_of_pod in enumerate(places):
    hosts = list(dict.fromkeys(place.address for place in devices_of_pod))
    job = config.cluster_def.job.add(name=f"pod_{pod}")
    for task, address in enumerate(hosts):
      job.tasks[task] = address
    devices.append(
      [
        f"/job:pod_{pod}/task:{hosts.index(x.address)}/device:cpu:{x.device}"
        for x in devices_of_pod
      ]
    )
  client = "/job:client/task:0/device:cpu:0"
  if mesh.tpu:
    jobs = [f"pod_{pod}" for pod in range(len(places))]
    return _with_tpus(mesh, client, config, target, jobs)
  return Cluster(HostDevices(client, devices), config, target)


@functools.cache
def tpus_here(mesh: MeshLayout) -> Cluster:
  """Returns where a pod of this process's TPUs runs; looks for them once.

  Raises:
    UserError: there are none, or they are another slice.
  """
  return _with_tpus(mesh, "/device:cpu:0", session_config(1), "", [None])


def _with_tpus(
  mesh: MeshLayout,
  client: str,
  config: tf.ConfigProto,
  target: str,
  jobs: Sequence[str | None],
) -> Cluster:
  """Returns where pods of TPUs run, as the TPUs there say.

  Raises:
    UserError: there are none, or they are another slice.
  """
  where = tpu_slice(mesh.tpu)
  topologies = []
  with tf.Graph().as_default(), tf.Session(target, config=config) as session:
    for job in jobs:
      place = f"{job}'s servers" if job else "this machine"
      try:
        found = session.run(tf.tpu.initialize_system(job=job))
      except tf.errors.InvalidArgumentError:  # there is no such device
        raise UserError(
          f'TPU = "{where.name}": TensorFlow sees no TPU on {place}. Install '
          "the TensorFlow that comes with the TPU, or drop TPU for CPUs and "
          "GPUs."
        ) from None
      topologies.append(tf.tpu.experimental.Topology(serialized=found))
      shape = tuple(topologies[-1].mesh_shape)
      if shape != where.mesh_shape:
        raise UserError(
          f'TPU = "{where.name}" is {where.mesh_shape} (x, y, z, device), and '
          f"{place} has {shape}; name that slice."
        )
  devices = tpu_devices(mesh, where, topologies, jobs=jobs, client=client)
  return Cluster(devices, config, target, jobs)


def start_server(
  num_devices: int,
  num_threads: int,
  listen: tuple[str, int] = ("127.0.0.1", 0),
) -> tf.distribute.Server:
  """Returns a server of this process.

  Args:
    num_devices: virtual CPU devices.
    num_threads: that share an operation's work; 0 is one a core.
    listen: IPv4 address and port, 0 for any that is free: what is sent to
      another address is not heard, and to a loopback address from this machine
      alone. "0.0.0.0" is every address.
  """
  ip, port = listen
  config = tf.ConfigProto(
    device_count={"CPU": num_devices, "GPU": 0},
    intra_op_parallelism_threads=num_threads,
    # With one, what waits for another pod would keep this one from working.
    inter_op_parallelism_threads=max(2, num_threads),
  )
  # Its name until a session gives it another, which has to be a new one. By its
  # address a session finds itself among its tasks.
  host = "127.0.0.1" if ip == ANY_ADDRESS else ip
  server = tf.distribute.Server(
    {"unnamed": [f"{host}:{port}"]}, config=config, start=False
  )
  port = int(server.target.rpartition(":")[2])
  if is_loopback(ip):
    keep_to_this_machine(port)
  elif ip != ANY_ADDRESS:
    keep_to_address(port, ip)
  server.start()
  publish(server, num_devices, num_threads)
  return server


@functools.cache
def _client_server(ip: str, port: int) -> tf.distribute.Server:
  """Returns the one of this process: it lasts as long, and cannot be ended."""
  return start_server(1, 0, (ip, port))
