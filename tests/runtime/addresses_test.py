# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Addresses that cannot work are refused in one line that says why."""

import socket

import pytest

from palm_mtf.runtime.addresses import (
  check_free,
  resolve,
  shut_down_connections,
  split_address,
)
from palm_mtf.runtime.server.restricted_port import restrict_to_address
from tests.refusals import message_of


def test_a_name_without_an_address_is_named():
  assert message_of(resolve, "ISLANDS", "no-such-host.invalid") == (
    'ISLANDS: the name "no-such-host.invalid" has no IPv4 address on this '
    "host; correct it, add it to /etc/hosts, or give the address itself."
  )


@pytest.mark.parametrize("given", ["2222", "host:", "host:70000", ":22"])
def test_what_is_no_address_is_refused(given):
  assert message_of(split_address, "--listen", given).startswith(
    f'--listen = "{given}": write ADDRESS:PORT'
  )


def test_a_port_in_use_and_another_hosts_address_are_refused():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    assert message_of(check_free, "--listen", "127.0.0.1", port) == (
      f'--listen = "127.0.0.1:{port}": port {port} is in use; give another, or '
      "0 for any."
    )
  check_free("--listen", "127.0.0.1", port)
  assert message_of(check_free, "--listen", "192.0.2.1", 0) == (
    '--listen = "192.0.2.1:0": this host has no such address.'
  )


@pytest.fixture
def listener():
  with socket.create_server(("", 0)) as server:
    yield server


def test_what_is_sent_to_another_address_is_not_heard(listener):
  port = listener.getsockname()[1]
  for ip in ("127.0.0.1", "127.0.0.2"):
    socket.create_connection((ip, port), timeout=5).close()
  restrict_to_address(listener, "127.0.0.1")
  with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
    client.sendall(b"heard")
    for _ in range(3):  # the third is the client's
      connection, _ = listener.accept()
    with connection:
      assert connection.recv(5) == b"heard"
  with pytest.raises(TimeoutError):
    socket.create_connection(("127.0.0.2", port), timeout=0.3)


def test_a_connection_that_is_shut_down_ends_and_no_other_does(listener):
  port = listener.getsockname()[1]
  near = socket.create_connection(("127.0.0.1", port), timeout=5)
  other = socket.create_connection(("127.0.0.2", port), timeout=5)
  with near, other:
    shut_down_connections(f"127.0.0.1:{port}")
    assert near.recv(1) == b""
    other.sendall(b"x")
