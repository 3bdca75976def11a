# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Opens a client of the accelerators of one pod, to run a trained model."""

import contextlib
import dataclasses
from collections.abc import Iterator

from palm_mtf.config import MeshLayout, PodsConfig
from palm_mtf.mesh.placement import Devices
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.client.connect import connect
from palm_mtf.runtime.client.heartbeat import Heartbeat
from palm_mtf.runtime.client.local_servers import PodServers


@contextlib.contextmanager
def open_pod(
  mesh: MeshLayout, pods: PodsConfig
) -> Iterator[tuple[Client, Devices]]:
  """Opens a client; yields it and the pod's devices.

  Args:
    mesh: axes of the pod.
    pods: settings of the run's pods. If servers are named in ISLANDS, the pod
      is the first of ISLANDS; otherwise this process has the accelerators.

  Raises:
    UserError: accelerators or servers are missing, or a server is lost while
      the client is open.
  """
  here = PodsConfig(pod_timeout_secs=pods.pod_timeout_secs)
  first = dataclasses.replace(pods, num_pods=1, islands=pods.islands[:1])
  pods = first if pods.has_islands else here
  with PodServers(pods, mesh) as servers:
    places, secs = servers.places(), pods.pod_timeout_secs
    with Heartbeat(servers, places, secs) as heartbeat:
      cluster = connect(pods, mesh, places, heartbeat.infos)
      with (
        heartbeat.during("while it ran the model"),
        cluster.client() as client,
      ):
        heartbeat.connect(client)
        yield client, cluster.devices
