# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A restricted socket hears one address; closing a connection ends calls."""

import socket

import pytest

from palm_mtf.runtime.server.restricted_port import restrict_to_address
from palm_mtf.runtime.sockets import shut_down_connections


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
