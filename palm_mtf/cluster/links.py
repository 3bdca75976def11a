# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Links between servers: each server probes the others of its run.

A client may reach two servers that do not reach each other, and whose step
never ends. Each server therefore publishes the servers that do not answer it,
and the client's heartbeat reads them.
"""

import logging
import threading
import time

from palm_mtf._tf import tf
from palm_mtf.cluster.server_info import (
  NoAnswerError,
  follow_claims,
  read_incarnation,
)

_logger = logging.getLogger(__name__)

# Probes in the time after which a link is silent: one may come too late where
# this process itself was stopped for a while.
_NUM_PROBES = 3


def watch_links(server: tf.distribute.Server) -> None:
  """Probes the other servers of each run that claims a server of this process.

  Args:
    server: TensorFlow server whose info was published.
  """
  # A step may keep all threads of the server busy, and this one waiting; probes
  # have threads of their own.
  threading.Thread(target=_follow, args=[server.target], daemon=True).start()


def _follow(target: str) -> None:
  """Probes the peers of each claim, and publishes those that are silent."""
  last, probes = None, {}
  silent: list[str] = []
  for claim in follow_claims(target, silent):
    if claim != last:
      for probe in probes.values():
        probe.end.set()
      probes = {x: _Probe(x, claim.link_secs) for x in claim.peers}
      last = claim
    before = set(silent)
    silent[:] = [x for x, probe in probes.items() if probe.is_silent]
    for address in set(silent) - before:
      _logger.warning(f"the server {address} does not answer this one")


class _Probe:
  """A thread that asks one server again and again.

  Attributes:
    is_silent: whether the server has not answered for some time.
    end: set to end the thread.
  """

  def __init__(self, address: str, secs: float):
    """Begins to ask the server at "host:port", which may be silent `secs`."""
    self.is_silent = False
    self.end = threading.Event()
    self._address, self._secs = address, secs
    threading.Thread(target=self._run, daemon=True).start()

  def _run(self) -> None:
    timeout = self._secs / _NUM_PROBES
    heard, num_failed = time.monotonic(), 0
    while not self.end.wait(timeout / 4):
      try:
        read_incarnation(self._address, timeout)
        heard, num_failed = time.monotonic(), 0
      except NoAnswerError:
        num_failed += 1
      is_late = time.monotonic() - heard >= self._secs
      self.is_silent = is_late and num_failed >= 2
