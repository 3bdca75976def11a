# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server starts restricted, or not; servers tell whom they do not reach."""

import contextlib
import errno
import os
import socket
import time

import pytest

from palm_mtf.cluster.server import restricted_port
from palm_mtf.cluster.server.start import start_server
from palm_mtf.cluster.server_info import claim_server, read_silent_peers
from palm_mtf.errors import UserError
from tests.cluster.served import Served
from tests.relay import Relay

SECS = 6.0


def claim_all(addresses, client):
  for address in addresses:
    peers = [x for x in addresses if x != address]
    assert claim_server(address, client, peers, SECS) == ""


def silent_of(address, expected, secs):
  """Waits until a server tells `expected`; returns the seconds it took."""
  start = time.monotonic()
  while (found := read_silent_peers(address, SECS)) != expected:
    assert time.monotonic() - start < secs, found
    time.sleep(0.05)
  return time.monotonic() - start


@pytest.mark.slow  # waits for its timeouts
def test_a_silent_link_is_told_in_time_while_it_lasts_and_to_its_run_alone():
  """A relay, by which the second server is known, is silent for the first."""
  with (
    Served(3) as servers,
    contextlib.closing(Relay(servers.addresses[1])) as relay,
  ):
    addresses = [servers.addresses[0], relay.address]
    claim_all(addresses, servers.addresses[2])
    time.sleep(SECS)
    for address in addresses:
      assert read_silent_peers(address, SECS) == []
    relay.silence(servers.processes[0].pid)
    # The client's heartbeat has the rest of the time.
    silent_of(addresses[0], [addresses[1]], 0.85 * SECS)
    # By the same relay the client still reaches the second server.
    assert read_silent_peers(addresses[1], SECS) == []
    relay.silence(None)
    silent_of(addresses[0], [], 2 * SECS)
    relay.silence(servers.processes[0].pid)
    silent_of(addresses[0], [addresses[1]], SECS)
    servers.processes[2].kill()
    other = start_server(1, 1).target.removeprefix("grpc://")
    assert claim_server(addresses[0], other, [], SECS) == ""
    assert read_silent_peers(addresses[0], SECS) == []


def test_a_port_that_another_process_took_meanwhile_is_one_line():
  """As that of two `pods serve` that begin at once."""
  with socket.create_server(("127.0.0.1", 0)) as other:
    port = other.getsockname()[1]
    with pytest.raises(UserError) as error:
      start_server(1, 1, ("127.0.0.1", port))
  assert str(error.value) == (
    f"127.0.0.1:{port}: another process has just begun to listen there; give "
    "another port, or 0 for any."
  )


def test_a_system_that_cannot_restrict_a_server_gets_none(monkeypatch):
  def refuse(listener):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(restricted_port, "restrict_to_loopback", refuse)
  with pytest.raises(UserError, match=r"\(Operation not permitted\)"):
    start_server(1, 1)
