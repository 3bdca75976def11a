# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server starts restricted, or not at all; silent links are published."""

import contextlib
import errno
import os
import socket
import time

import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.client import connect
from palm_mtf.runtime.client.connect import claim_servers
from palm_mtf.runtime.client.places import Place
from palm_mtf.runtime.server import restricted_port
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import claim_server, read_silent_peers
from tests.relay import Relay
from tests.runtime.served import Served

SECS = 6.0


def claim_all(addresses, client):
  for address in addresses:
    peers = [x for x in addresses if x != address]
    assert claim_server(address, client, peers, SECS) == ""


def silent_of(address, expected, secs):
  """Waits until a server publishes `expected`; returns the seconds."""
  start = time.monotonic()
  while (found := read_silent_peers(address, SECS)) != expected:
    assert time.monotonic() - start < secs, found
    time.sleep(0.05)
  return time.monotonic() - start


@pytest.mark.slow  # waits for its timeouts
def test_a_silent_link_is_published_in_time_and_only_to_its_run():
  """A relay to the second server drops the first server's packets."""
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
    # Through the same relay the client still reaches the second server.
    assert read_silent_peers(addresses[1], SECS) == []
    relay.silence(None)
    silent_of(addresses[0], [], 2 * SECS)
    relay.silence(servers.processes[0].pid)
    silent_of(addresses[0], [addresses[1]], SECS)
    servers.processes[2].kill()
    other = start_server(1, 1).target.removeprefix("grpc://")
    assert claim_server(addresses[0], other, [], SECS) == ""
    assert read_silent_peers(addresses[0], SECS) == []


@pytest.mark.slow  # waits for its timeouts
def test_a_silent_link_that_no_server_probes_all_the_time_is_found_in_turn():
  """Of eight servers, each probes three; no other server shares this link."""
  started = [start_server(1, 1) for _ in range(7)]
  ring = [x.target.removeprefix("grpc://") for x in started]
  with (
    Served(1) as servers,
    contextlib.closing(Relay(ring[3])) as relay,
  ):
    ring[3] = relay.address
    ring.append(servers.addresses[0])
    assert (ring.index(relay.address) - 7) % 8 == 4
    client = start_server(1, 1).target.removeprefix("grpc://")
    claim_servers([[Place(x, 0)] for x in ring], client, SECS)
    time.sleep(2 * SECS)
    assert read_silent_peers(ring[7], SECS) == []
    relay.silence(servers.processes[0].pid)
    silent_of(ring[7], [relay.address], 3 * SECS)
    relay.silence(None)
    silent_of(ring[7], [], 2 * SECS)


def test_a_server_probes_three_others_however_many_there_are(monkeypatch):
  claims = {}

  def claim(address, client, peers, secs):
    claims[address] = peers
    return ""

  monkeypatch.setattr(connect, "claim_server", claim)
  for number in (1, 2, 4, 5, 1536):
    claims.clear()
    ring = [f"h:{i}" for i in range(number)]
    claim_servers([[Place(x, 0), Place(x, 1)] for x in ring], "client:1", SECS)
    assert claims.keys() == {*ring}
    for i, address in enumerate(ring):
      steps = range(1, min(3, number - 1) + 1)
      assert claims[address] == [ring[(i + x) % number] for x in steps]


def test_a_port_that_another_process_took_is_one_line():
  """This happens if two `pods serve` start at the same time."""
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
