# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The processes that read and write checkpoints, and the slices of each.

If all servers of a run see the folder of its checkpoints, each server reads and
writes the slices on its devices. Otherwise the client reads and writes all.
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
from palm_mtf.checkpoints.weight_files import make_empty_file
from palm_mtf.mesh.slices import Pods, Slice, cpu_of_process
from palm_mtf.model_dir.atomic_files import PARTIAL, writing
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.processes import Process
from palm_mtf.runtime.program import Program

_logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class CheckpointProcesses:
  """The processes that read and write the checkpoints of a session."""

  # The client, which reads and writes everything if `servers` is empty.
  client: Process
  # Servers of all devices, by the name of the server's CPU device.
  servers: Mapping[str, Process] = dataclasses.field(default_factory=dict)

  @property
  def all(self) -> list[Process]:
    """The servers, or the client if there are no servers."""
    return list(self.servers.values()) or [self.client]

  @property
  def client_only(self) -> "CheckpointProcesses":
    """A copy in which the client reads and writes everything."""
    return CheckpointProcesses(self.client)

  def of(self, part: Slice) -> Process:
    """Returns the process that reads, and can write, a variable's slice."""
    return self.servers.get(cpu_of_process(part.near), self.client)


THIS_PROCESS = CheckpointProcesses(Process("/device:cpu:0"))


def find_checkpoint_processes(
  client: Client, this: Process, servers: Sequence[Process], folder: str
) -> CheckpointProcesses:
  """Returns the processes that read and write the checkpoints in a folder.

  These are the servers if all of them share the folder, otherwise the client.
  The folder is made if it is missing. `servers` is empty if the client has the
  devices.
  """
  if not servers:
    return CheckpointProcesses(this)
  # Each server makes a file in a temporary folder. If the client does not find
  # the file, that server does not share the folder.
  with writing(folder, None):
    os.makedirs(folder, exist_ok=True)
    common = tempfile.mkdtemp(prefix=PARTIAL, dir=os.path.abspath(folder))
  try:
    with client.graph.as_default():
      made = [
        server.call(make_empty_file, [os.path.join(common, str(i))], [tf.int32])
        for i, server in enumerate(servers)
      ]
    client.call(Program(outputs=made))
    found = os.listdir(common)
  finally:
    shutil.rmtree(common, ignore_errors=True)
  for number, server in enumerate(servers):
    if str(number) not in found:
      _logger.info(
        f"the client reads and writes checkpoints for all servers: "
        f"{server.device} does not share {folder}"
      )
      return CheckpointProcesses(this)
  return CheckpointProcesses(this, {x.device: x for x in servers})


def assign_slices(
  pods: Pods, processes: CheckpointProcesses
) -> dict[Process, list[Slice]]:
  """Assigns each region of a variable to one process, and balances the bytes.

  A region is the part of the variable that a slice holds. Several devices, and
  all pods, may hold the same region.

  Returns:
    The slices that each process has to write, without processes that write
    none.
  """
  # For each region, collect one slice from each process that holds the region.
  regions = []
  for name in pods[0]:
    holders = collections.defaultdict(dict)
    for slices in pods:
      for part in slices[name]:
        if part.spec is not None:
          holders[part.spec].setdefault(processes.of(part).device, part)
    regions += holders.values()
  # Begin with the largest region. Assign each region to the process that has
  # the fewest bytes so far, of those that hold the region.
  num_bytes = {process.device: 0 for process in processes.all}
  found = {process.device: [] for process in processes.all}
  for holders in sorted(regions, key=_count_bytes, reverse=True):
    device = min(holders, key=num_bytes.get)
    num_bytes[device] += _count_bytes(holders)
    found[device].append(holders[device])
  return {x: found[x.device] for x in processes.all if found[x.device]}


def _count_bytes(holders: Mapping[str, Slice]) -> int:
  part = next(iter(holders.values()))
  size = part.variable.dtype.base_dtype.size
  return len(part.names) * math.prod(part.sizes) * size
