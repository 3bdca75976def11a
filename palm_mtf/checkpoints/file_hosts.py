# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The hosts that read and write checkpoints, and the slices that each has.

Where all servers of a run see the folder of its checkpoints, each of them
reads and writes slices of its own devices. Elsewhere the client does all that.
"""

import collections
import dataclasses
import logging
import math
import os
import shutil
import tempfile
from collections.abc import Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.host_files import leave_mark
from palm_mtf.mesh.processes import Process, cpu_of_process
from palm_mtf.mesh.slices import Pods, Slice
from palm_mtf.model_dir.atomic_files import PARTIAL, writing

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class FileHosts:
  """The hosts that read and write the files of a session.

  Attributes:
    client: the client, which does it alone where there are no `servers`.
    servers: hosts of all devices, by the name of their CPU.
  """

  client: Process
  servers: Mapping[str, Process] = dataclasses.field(default_factory=dict)

  @property
  def all(self) -> list[Process]:
    """Every host, in order."""
    return list(self.servers.values()) or [self.client]

  @property
  def client_alone(self) -> "FileHosts":
    """The client without servers."""
    return FileHosts(self.client)

  def of(self, part: Slice) -> Process:
    """Returns the host that reads a slice, and may write it."""
    return self.servers.get(cpu_of_process(part.near), self.client)


LOCAL_FILES = FileHosts(Process("/device:cpu:0"))


def find_file_hosts(
  session: tf.Session, client: Process, servers: Sequence[Process], folder: str
) -> FileHosts:
  """Returns the hosts that read and write the checkpoints in a folder.

  Args:
    session: session of the current graph, which reaches the servers.
    client: this process.
    servers: hosts of all devices; none if they are the client's.
    folder: folder of the checkpoints, made if need be.
  """
  if not servers:
    return FileHosts(client)
  # Each server makes a file in a folder that is new; the client looks for all.
  with writing(folder, None):
    os.makedirs(folder, exist_ok=True)
    common = tempfile.mkdtemp(prefix=PARTIAL, dir=os.path.abspath(folder))
  try:
    paths = [os.path.join(common, str(i)) for i in range(len(servers))]
    marks = [
      server.call(leave_mark, [path], [tf.int32])
      for server, path in zip(servers, paths, strict=True)
    ]
    session.run(marks)
    made = os.listdir(common)
  finally:
    shutil.rmtree(common, ignore_errors=True)
  for number, server in enumerate(servers):
    if str(number) not in made:
      _logger.info(
        f"the client reads and writes checkpoints for all servers: "
        f"{server.device} does not share {folder}"
      )
      return FileHosts(client)
  return FileHosts(client, {x.device: x for x in servers})


def slices_to_write(pods: Pods, hosts: FileHosts) -> dict[Process, list[Slice]]:
  """Returns the slices that each host writes: every region once, evenly.

  Args:
    pods: slices of each pod, by checkpoint name, with the same bits in all.
    hosts: hosts that write.
  """
  # Of each region of a variable, one slice for each host that holds it.
  regions = []
  for name in pods[0]:
    holders = collections.defaultdict(dict)
    for slices in pods:
      for part in slices[name]:
        if part.spec is not None:
          holders[part.spec].setdefault(hosts.of(part).device, part)
    regions += holders.values()
  # The largest first, each to the host that has least so far.
  num_bytes = {host.device: 0 for host in hosts.all}
  found = {host.device: [] for host in hosts.all}
  for holders in sorted(regions, key=_num_bytes, reverse=True):
    device = min(holders, key=num_bytes.get)
    num_bytes[device] += _num_bytes(holders)
    found[device].append(holders[device])
  return {x: found[x.device] for x in hosts.all if found[x.device]}


def _num_bytes(holders: Mapping[str, Slice]) -> int:
  part = next(iter(holders.values()))
  size = part.variable.dtype.base_dtype.size
  return len(part.names) * math.prod(part.sizes) * size
