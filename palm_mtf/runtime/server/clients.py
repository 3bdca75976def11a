# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The clients of this process's servers, and links to other servers.

A client joins its servers before it opens a session, and leaves them at its
end. Each server probes its clients, and frees the memory of a client that has
left or no longer answers, so that other clients can use the memory.

A client may reach two servers that do not reach each other. Then a training
step never ends. Therefore the heartbeat of a client asks each server which of
its peers (some of the other servers) do not answer it.
"""

import dataclasses
import errno
import json
import logging
import math
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from palm_mtf._tf import tf
from palm_mtf.json_text import json_text, read_dataclass
from palm_mtf.machine.host_memory import free_garbage
from palm_mtf.runtime.addresses import shut_down_connections
from palm_mtf.runtime.host_functions import host_function
from palm_mtf.runtime.server_info import NoAnswerError, read_incarnation

_logger = logging.getLogger(__name__)

# The timeout of a probe is the time after which the probed process counts as
# silent, divided by this number, so that several probes have to fail. A single
# probe also fails if this process itself is suspended.
_NUM_PROBES = 3
# A peer counts as silent after this share of POD_TIMEOUT_SECS. In the remaining
# time the client's heartbeat asks several times which peers are silent.
_LINK_SHARE = 0.6
# A server probes a peer until no client has asked about the peer for this many
# times POD_TIMEOUT_SECS, so that probes end soon after the clients.
_LINK_LEASE = 3.0
_REFUSAL_SECS = 1.0  # timeout for asking whether a port is open

_Function = TypeVar("_Function", bound=Callable[[str], None])
_leaving: list[Callable[[str], None]] = []  # callbacks that free client memory
_targets: list[str] = []  # "grpc://..." of own servers, to end sessions there
_clients: dict[str, "_Probe"] = {}  # probes of clients, by name
_links: dict[tuple[str, float], "_Probe"] = {}  # {(peer address, secs): probe}
_links_lock = threading.Lock()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Registration:
  """What a client tells its servers, so that they know when it is gone."""

  name: str  # the client's job, which no other client of the servers has
  address: str  # "host:port" of the client's own server
  incarnation: int  # random number from its server's start, to notice restarts
  secs: float  # POD_TIMEOUT_SECS, after which a silent client counts as gone
  # Names of earlier clients of the same process that got no answer when they
  # left: the server may still hold their memory.
  ended: Sequence[str] = ()


def at_leave(function: _Function) -> _Function:
  """Registers a function that frees the memory of a client, given its name."""
  _leaving.append(function)
  return function


def add_server(target: str) -> None:
  """Lets `free_memory` end sessions on a server; `target` is "grpc://..."."""
  _targets.append(target)


@host_function
def join_server(text: bytes) -> bytes:
  """Probes a client until it is gone; `text` is a `Registration` as JSON."""
  client = read_dataclass(Registration, text)
  for name in client.ended:
    leave_server(name.encode())
  # A client that missed the answer to this call repeats it.
  if client.name not in _clients:
    _clients[client.name] = _Probe(client.address, client.secs, client)
    _clients[client.name].start()
  return b""


@host_function
def leave_server(name: bytes) -> bytes:
  """Frees the memory of a client that has closed its session."""
  if probe := _clients.get(name.decode()):
    probe.until = 0.0
    free_memory(name.decode())
  return b""


@host_function
def find_silent_peers(text: bytes) -> bytes:
  """Returns a JSON list of the peers that do not answer this server.

  `text` is the JSON of {"peers": addresses of servers, "secs":
  POD_TIMEOUT_SECS}. This server probes the peers from the first call until
  _LINK_LEASE * POD_TIMEOUT_SECS seconds after the last call.
  """
  asked = json.loads(text)
  secs = asked["secs"]
  with _links_lock:
    for address in asked["peers"]:
      link = _links.get((address, secs))
      if not link or not link.is_alive():
        link = _links[address, secs] = _Probe(address, _LINK_SHARE * secs)
        link.start()
      link.until = time.monotonic() + _LINK_LEASE * secs
    silent = [x for x in asked["peers"] if _links[x, secs].is_silent]
  return json_text(silent).encode()


class _Probe(threading.Thread):
  """A thread that probes the server of another process at `address`.

  If a client runs that server, the thread frees the client's memory in this
  process once the client is gone.
  """

  def __init__(
    self, address: str, secs: float, client: Registration | None = None
  ):
    super().__init__(daemon=True)
    self.until = math.inf  # when the thread ends, in seconds of time.monotonic
    self.is_silent = False  # whether there was no answer for `secs` seconds
    self._address, self._secs, self._client = address, secs, client

  def run(self) -> None:
    timeout = self._secs / _NUM_PROBES
    heard, num_failed = time.monotonic(), 0
    while time.monotonic() < self.until:
      # Look at a client's port first, because a session with a process that
      # has ended waits for its whole timeout.
      has_ended = bool(self._client) and _refuses(self._address)
      try:
        if not has_ended:
          found = read_incarnation(self._address, timeout)
          has_ended = bool(self._client) and found != self._client.incarnation
          heard, num_failed = time.monotonic(), 0
      except NoAnswerError:
        num_failed += 1
      is_late = time.monotonic() - heard >= self._secs and num_failed >= 2
      if is_late and not self.is_silent:
        _logger.warning(f"{self._address} does not answer this server")
      self.is_silent = is_late
      if self._client and (is_late or has_ended):
        break
      time.sleep(timeout / 4)
    if self._client and self.until:  # `until` is 0 after `leave_server`
      _logger.warning(f"{self._client.name} at {self._address} is gone")
      if self.is_silent:
        # Make a step that waits for a tensor of the client fail, because the
        # step keeps the client's variables on this server alive.
        shut_down_connections(self._address)
      free_memory(self._client.name)


def _refuses(address: str) -> bool:
  """Returns whether a host answers that no process listens on the port."""
  ip, _, port = address.rpartition(":")
  with socket.socket() as trial:
    trial.settimeout(_REFUSAL_SECS)
    return trial.connect_ex((ip, int(port))) == errno.ECONNREFUSED


def free_memory(name: str) -> None:
  """Frees the memory of a client in this process; forgets the client."""
  for target in _targets:
    # TensorFlow deletes the sessions of a client if another process opens a
    # session under the client's name. Therefore open such a session.
    config = tf.ConfigProto(isolate_session_state=True)
    address = target.removeprefix("grpc://")
    config.cluster_def.job.add(name=name).tasks[0] = address
    with tf.Session(target, tf.Graph(), config) as session:
      with session.graph.as_default():
        tf.no_op()
      session._extend_graph()  # begins the session
  for free_client in _leaving:
    free_client(name)
  free_garbage()
  _clients.pop(name, None)
