# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Starts a TensorFlow server in this process, and probes other servers.

A client may reach two servers that do not reach each other. Then a training
step never ends. Each server therefore probes other servers of its run and
publishes a list of the silent ones, which the client's heartbeat reads. A
server probes a few servers all the time, and the rest in turn, so that the
number of probes grows only linearly with the number of servers.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from palm_mtf import __version__
from palm_mtf._tf import tf
from palm_mtf.json_text import json_text
from palm_mtf.machine.compiled_code import check_xla_flags
from palm_mtf.machine.host_memory import resident_bytes
from palm_mtf.machine.kernels import kernels_here
from palm_mtf.machine.processors import kernel_flags
from palm_mtf.native.operations import operations, operations_built_with
from palm_mtf.runtime.addresses import ANY_ADDRESS, explain_start_error
from palm_mtf.runtime.host_functions import HOST_FUNCTIONS, host_function
from palm_mtf.runtime.processes import function_token
from palm_mtf.runtime.server.restricted_port import restricted_port
from palm_mtf.runtime.server_info import (
  CLAIM,
  INFO,
  NUM_PEERS,
  SILENT,
  Claim,
  NoAnswerError,
  ServerInfo,
  assign_text,
  parse_claim,
  read_incarnation,
  read_next_peer,
  read_text,
)

_logger = logging.getLogger(__name__)

host_function(resident_bytes)

_FOLLOW_SECS = 0.5  # between two reads of the `Claim`, which names the client
# The timeout of a probe (a call to another server) is `Claim.link_secs` divided
# by this number, so that a server counts as silent only after several failed
# probes. A single probe also fails if this process itself is suspended.
_NUM_PROBES = 3


def start_server(
  num_devices: int,
  num_threads: int,
  listen: tuple[str, int] = ("127.0.0.1", 0),
) -> tf.distribute.Server:
  """Starts a TensorFlow server in this process.

  Args:
    num_devices: number of virtual CPU devices.
    num_threads: number of threads per operation; 0 is one per core.
    listen: IPv4 address and port; 0 is any free port, "0.0.0.0" every address.

  Raises:
    UserError: the port is taken, the system cannot restrict the server, or
      TF_XLA_FLAGS cannot work with so many devices.
  """
  check_xla_flags(num_devices)
  ip, port = listen
  config = tf.ConfigProto(
    device_count={"CPU": num_devices, "GPU": 0},
    intra_op_parallelism_threads=num_threads,
    # Use at least two threads, because an operation that waits for another pod
    # blocks one. Add one more that writes checkpoints meanwhile.
    inter_op_parallelism_threads=max(2, num_threads) + 1,
  )
  # Any job name works, because a client's session later gives the server
  # another one. The session recognizes the server by this address.
  host = "127.0.0.1" if ip == ANY_ADDRESS else ip
  try:
    with contextlib.ExitStack() as stack:
      if ip != ANY_ADDRESS:
        port = stack.enter_context(restricted_port(ip, port))
      server = tf.distribute.Server(
        {"unnamed": [f"{host}:{port}"]}, config=config, start=False
      )
  except (OSError, tf.errors.OpError) as error:
    raise explain_start_error(f"{host}:{listen[1]}", error) from None
  server.start()
  _publish_info(server, num_devices, num_threads)
  return server


def _publish_info(
  server: tf.distribute.Server, num_devices: int, num_threads: int
) -> None:
  info = ServerInfo(
    palm_mtf=__version__,
    tensorflow=tf.__version__,
    num_devices=num_devices,
    num_threads=num_threads,
    functions={x: function_token(y) for x, y in HOST_FUNCTIONS.items()},
    has_native=operations() is not None,
    cpu_flags=kernel_flags(),
    kernels=kernels_here(operations_built_with()),
  )
  with tf.Graph().as_default(), tf.Session(server.target) as session:
    text = json_text(dataclasses.asdict(info))
    session.run(
      [assign_text(INFO, text), assign_text(CLAIM, ""), assign_text(SILENT, "")]
    )


def watch_links(server: tf.distribute.Server) -> None:
  """Starts to probe the other servers of every run that uses this server."""
  # This thread reads the server's variables, so it waits while a training step
  # keeps all threads of the server busy. Each probe has a separate thread,
  # which does not wait.
  threading.Thread(
    target=_probe_peers, args=[server.target], daemon=True
  ).start()


def _probe_peers(target: str) -> None:
  """Probes the other servers of the client's run; publishes the silent ones."""
  last: Claim | None = None
  probes: list[_Probe] = []
  silent: list[str] = []
  for claim in _follow_claims(target, silent):
    if claim != last:
      for probe in probes:
        probe.end.set()
      probes = [_Probe(x, claim.link_secs) for x in claim.peers]
      if len(claim.peers) == NUM_PEERS:  # there may be more servers
        walk = _Probe(claim.peers[-1], claim.link_secs, is_walk=True)
        probes.append(walk)
      last = claim
    before = set(silent)
    silent[:] = {probe.address for probe in probes if probe.is_silent}
    for address in set(silent) - before:
      _logger.warning(f"the server {address} does not answer this one")


class _Probe:
  """A thread that probes a server repeatedly.

  Attributes:
    address: "host:port" of the server.
    is_silent: whether the server has not answered for `secs` seconds.
    end: event that ends the thread.
  """

  def __init__(self, address: str, secs: float, is_walk: bool = False):
    """Starts the thread.

    Args:
      address: "host:port" of the server.
      secs: time in seconds after which a server counts as silent.
      is_walk: whether to probe the next server of the ring (`Claim.peers`)
        after each answer.
    """
    self.address, self.is_silent = address, False
    self.end = threading.Event()
    self._secs, self._is_walk = secs, is_walk
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self) -> None:
    timeout = self._secs / _NUM_PROBES
    heard, num_failed = time.monotonic(), 0
    while not self.end.wait(timeout / 4):
      try:
        read_incarnation(self.address, timeout)
        if self._is_walk:
          self.address = read_next_peer(self.address, timeout)
        heard, num_failed = time.monotonic(), 0
      except NoAnswerError:
        num_failed += 1
      is_late = time.monotonic() - heard >= self._secs
      self.is_silent = is_late and num_failed >= 2


def _follow_claims(target: str, silent: Sequence[str]) -> Iterator[Claim]:
  """Yields, every half second, the claim of the client that uses the server.

  Never ends; yields nothing while no client uses the server.

  Args:
    target: TensorFlow's target of the server, which runs in this process.
    silent: "host:port" of each silent server of the claim. The caller changes
      the list between two yields; each change is published.
  """
  with tf.Graph().as_default(), tf.Session(target) as session:
    text = tf.placeholder(tf.string, [])
    held, publish_silent = read_text(CLAIM), assign_text(SILENT, text)
    published = ""
    while True:
      found = session.run(held)
      if claim := parse_claim(found):
        yield claim
        report = json_text({"claim": found.decode(), "peers": list(silent)})
        if report != published:
          session.run(publish_silent, {text: report})
          published = report
      time.sleep(_FOLLOW_SECS)
