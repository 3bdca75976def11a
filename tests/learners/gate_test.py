# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Strangers cannot take the gate's descriptors, and no byte is lost in it."""

import asyncio
import contextlib
import os
import socket
import time

import pytest

from palm_mtf.learners import gate
from palm_mtf.runtime.manager.service import event_loop

CONTENT = os.urandom(4 * 2**20)


@pytest.fixture(name="port")
def open_port(tmp_path):
  """Yields the port of a gate; its server sends CONTENT, and ends."""
  path = str(tmp_path / "inner")

  async def answer(reader, writer):
    with contextlib.closing(writer), contextlib.suppress(OSError):
      if await reader.read(1):
        writer.write(CONTENT)
        await writer.drain()

  async def start():
    inner = await asyncio.start_unix_server(answer, path)
    return inner, await gate.open_gate(path, "127.0.0.1", 0)

  with event_loop() as loop:
    servers = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield servers[1].sockets[0].getsockname()[1]
    for server in servers:
      loop.call_soon_threadsafe(server.close)


def connect(port, near="127.0.0.1"):
  return socket.create_connection(("127.0.0.1", port), 5, (near, 0))


def count_descriptors():
  return len(os.listdir("/proc/self/fd"))


def until(is_true, secs=10.0):
  """Waits until a condition holds, and returns whether it does."""
  end = time.monotonic() + secs
  while not is_true() and time.monotonic() < end:
    time.sleep(0.05)
  return is_true()


def test_a_peer_that_reads_slowly_gets_the_last_byte(port):
  """Also if the server has closed its connection long before."""
  with connect(port) as connection:
    connection.sendall(b"x")
    time.sleep(0.3)
    found = b""
    while chunk := connection.recv(2**16):
      found += chunk
      time.sleep(0.001)
  assert found == CONTENT


def test_connections_of_many_addresses_leave_descriptors_for_the_run(port):
  """Systems often allow 1,024, and a connection needs three at the gate."""
  before = count_descriptors()
  with contextlib.ExitStack() as stack:
    most = 0
    for i in range(8 * 64):
      near = f"127.0.0.{2 + i // 64}"
      stack.enter_context(connect(port, near))
      most = max(most, count_descriptors() - before - (i + 1))
    assert most <= 3 * gate.MOST_CONNECTIONS + 100
    assert until(
      lambda: (
        count_descriptors() - before - 512 <= 3 * gate.MOST_CONNECTIONS + 1
      )
    )
  assert until(lambda: count_descriptors() <= before)


def test_a_peer_that_reads_nothing_loses_its_place(port, monkeypatch):
  """Otherwise it would have the place, and a chunk in memory, forever."""
  monkeypatch.setattr(gate, "_SECS", 0.5)
  before = count_descriptors()
  with contextlib.ExitStack() as stack:
    for _ in range(64):
      connection = socket.socket()
      connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      connection.settimeout(5)
      stack.enter_context(connection)
      connection.connect(("127.0.0.1", port))
      connection.sendall(b"x")
    assert until(lambda: count_descriptors() <= before + 64)
    with connect(port) as connection:
      connection.sendall(b"x")
      assert connection.recv(1) == CONTENT[:1]
