# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How many pods train, where they are, and what crosses between them.

A pod is a mesh of devices with a copy of all parameters. A step divides its
batch by rows into NUM_PODS equal shares, and each share into NUM_MICROBATCHES.
Each pod adds up the gradients of all pods, so that all make the same update.

  GLOBAL_BATCH_SIZE = 16, NUM_PODS = 2, NUM_MICROBATCHES = 2

  pod           0 0 0 0 0 0 0 0 1 1 1 1 1 1 1 1
  microbatch    0 0 0 0 1 1 1 1 0 0 0 0 1 1 1 1
"""

import dataclasses
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from palm_mtf.config.checked import Checked, Count, real, text_or_empty, whole
from palm_mtf.errors import UserError, check_choice

# The client sends each pod its batches and starts its steps, so many pods could
# overload the client. Tests use up to this number.
MAX_PODS = 8
# Values of ISLANDS that let the manager of `pods manage` choose the servers.
MANAGED_ISLANDS = ("auto", "same", "apart")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PodsConfig(Checked):
  """The pods of a run; their number and place change speed, never results.

  Attributes:
    num_pods: number of pods that share a step, 1 to 8.
    pods: where the pods are: "in_process", devices of the client's process;
      "local_servers", processes that the client starts; or "cluster", servers
      that `palm_mtf pods serve` has started.
    islands: for PODS = "cluster", a list of servers per pod
      (runtime/client/places.py). If MANAGER chooses the servers of pods and
      stages: "auto", on any islands (servers with a fast network between them);
      "same", all on one; or "apart", each pod and each stage on another.
    manager: "host:port" of `palm_mtf pods manage`, if it chooses the servers.
    manager_tls: PREFIX of PREFIX.key and PREFIX.pem, the key and certificate of
      the manager and its clients; "" for none.
    device_bytes: memory in bytes that the manager reserves for this client on
      each device; None for what `palm_mtf plan` computes for the run.
    share: this client's share of the time of devices that it shares with other
      clients, if the manager's --policy is "shares"; its priority if that is
      "priority".
    client_address: "host" or "host:port" where servers reach the client.
    coordinator_port: port on which the first host of a pod of accelerators on
      several hosts lets the others join it; the next pods use the next ports.
      0 is any free port.
    dcn_dtype: dtype in which gradients are sent between pods; bfloat16 halves
      the traffic (Pathways, section 4.4). All pods add up the same rounded
      gradients, in float32.
    fingerprint_steps: steps between comparisons of all pods' variables.
    pod_timeout_secs: if a server gives no sign of life for so many seconds, its
      pod counts as lost. A step may take longer than this.
    on_pod_failure: "stop", "wait" for the lost pod, or "shrink" to the pods
      that are left (training/supervisor.py).
    pod_wait_secs: the longest wait for a lost pod, or for a pod that is missing
      when the run starts.
  """

  num_pods: Annotated[int, whole(maximum=MAX_PODS)] = 1
  pods: Literal["in_process", "local_servers", "cluster"] = "in_process"
  islands: Sequence[Sequence[str]] | str = ()
  manager: Annotated[
    str, text_or_empty('the address of a manager, "host:port", or "" for none')
  ] = ""
  manager_tls: Annotated[
    str,
    text_or_empty('the PREFIX of PREFIX.key and PREFIX.pem, or "" for none'),
  ] = ""
  device_bytes: Annotated[int, whole(0)] | None = None
  share: Annotated[float, real(0.001, 1000)] = 1.0
  client_address: str = "127.0.0.1"
  coordinator_port: Annotated[int, whole(0, 65000)] = 0
  dcn_dtype: Literal["float32", "bfloat16"] = "float32"
  fingerprint_steps: Count = 100
  pod_timeout_secs: Annotated[float, real(1.0, 1e6)] = 60.0
  on_pod_failure: Literal["stop", "wait", "shrink"] = "stop"
  pod_wait_secs: Annotated[float, real(1.0, 1e6)] = 3600.0

  def __post_init__(self) -> None:
    super().__post_init__()
    # Without a port, or with port 0, the client chooses a port.
    if not re.fullmatch(r"[^\s:/]+(:[0-9]{1,5})?", str(self.client_address)):
      raise UserError(
        f'CLIENT_ADDRESS = {self.client_address!r}: write "host" or '
        '"host:port", of this host.'
      )
    if self.pods == "cluster" and not self.islands:
      raise UserError(
        'PODS = "cluster" and ISLANDS is empty: list the servers of each pod, '
        'as in [["host-a:2222"], ["host-b:2222"]].'
      )
    if isinstance(self.islands, str):
      check_choice("ISLANDS", self.islands, MANAGED_ISLANDS)
    if bool(self.manager) != self.is_managed:
      raise UserError(
        f'MANAGER = "{self.manager}", ISLANDS = {self.islands!r} and PODS = '
        f'"{self.pods}": for servers that a manager chooses, set MANAGER = '
        '"host:port", ISLANDS = "auto" and PODS = "cluster"; else drop MANAGER.'
      )

  @property
  def has_islands(self) -> bool:
    """Whether ISLANDS names the servers of the pods."""
    return self.pods == "cluster" and not isinstance(self.islands, str)

  @property
  def is_managed(self) -> bool:
    """Whether a manager chooses the servers of the pods."""
    return self.pods == "cluster" and isinstance(self.islands, str)
