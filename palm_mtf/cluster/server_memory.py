# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Host memory of the pods' servers, in the metrics of the client."""

import re
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.machine.host_memory import resident_bytes
from palm_mtf.mesh.host_functions import Host

_POD = re.compile(r"/job:(pod_\d+)/")


class ServerMemory:
  """Resident bytes of every server that a session works with."""

  def __init__(self, session: tf.Session, servers: Sequence[Host]):
    """Builds the operations that read them, in the current graph.

    Args:
      session: session of the current graph, which reaches the servers.
      servers: hosts of all devices; none if they are the client's.
    """
    self._session = session
    self._bytes: dict[str, list[tf.Tensor]] = {}  # of servers, by pod
    for server in servers:
      (pod,) = _POD.findall(server.device)
      values = server.call(resident_bytes, [], [tf.int64])
      self._bytes.setdefault(pod, []).extend(values)

  def read(self) -> dict[str, int]:
    """Returns the bytes of each pod's largest server, by name of the metric.

    Raises:
      OpError: a server is lost.
    """
    if not self._bytes:
      return {}
    return {
      f"host_memory_bytes/{pod}": int(max(sizes))
      for pod, sizes in self._session.run(self._bytes).items()
    }
