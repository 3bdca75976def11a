# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A server starts restricted, or not at all; silent links are published."""

import contextlib
import errno
import json
import os
import socket
import time

import pytest

from palm_mtf.errors import UserError
from palm_mtf.runtime.server import restricted_port
from palm_mtf.runtime.server.clients import find_silent_peers
from palm_mtf.runtime.server.start import start_server
from palm_mtf.runtime.server_info import call_function, read_info
from tests.relay import Relay
from tests.runtime.served import Served

SECS = 6.0


def find_silent(address, peers):
  asked = json.dumps({"peers": peers, "secs": SECS})
  info = read_info(address, SECS)
  return json.loads(
    call_function(address, info, find_silent_peers, asked, SECS)
  )


def wait_for_silent(address, peers, expected, secs):
  """Waits until a server finds the peers `expected` silent."""
  start = time.monotonic()
  while (found := find_silent(address, peers)) != expected:
    assert time.monotonic() - start < secs, found
    time.sleep(0.05)


@pytest.mark.slow  # waits for its timeouts
def test_a_silent_link_is_found_in_time():
  """A relay to the second server drops the first server's packets."""
  with (
    Served(2) as servers,
    contextlib.closing(Relay(servers.addresses[1])) as relay,
  ):
    first, second = servers.addresses[0], relay.address
    assert find_silent(first, [second]) == []
    assert find_silent(second, [first]) == []
    time.sleep(SECS)
    assert find_silent(first, [second]) == []
    relay.silence(servers.processes[0].pid)
    # The client's heartbeat has the rest of the time.
    wait_for_silent(first, [second], [second], 0.85 * SECS)
    # Through the same relay the client still reaches the second server.
    assert find_silent(second, [first]) == []
    relay.silence(None)
    wait_for_silent(first, [second], [], 2 * SECS)
    relay.silence(servers.processes[0].pid)
    wait_for_silent(first, [second], [second], SECS)


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
