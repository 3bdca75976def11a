# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Idle connections block no client, and no request fills the log."""

import asyncio
import resource
import socket

import pytest

from palm_mtf.generation.serving import connections
from tests.generation.serving.live_server import (
  Repeating,
  ask,
  complete,
  exchange,
  http,
  serving,
  until,
)

HALF = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


@pytest.fixture
def few(monkeypatch):
  """Limits servers to 8 connections."""
  monkeypatch.setattr(connections, "raise_connection_limit", lambda: 8)
  monkeypatch.setattr(
    "palm_mtf.generation.serving.server.raise_connection_limit", lambda: 8
  )


def test_idle_connections_block_no_client(few, caplog):
  async def run():
    async with serving() as (server, address):
      held = [await asyncio.open_connection(*address) for _ in range(40)]
      for _, writer in held[::3]:
        writer.write(HALF)
      used = [await asyncio.open_connection(*address) for _ in range(40)]
      for _, writer in used[:4]:
        writer.write(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
      assert await ask(address, "GET", "/health") == (200, {"status": "ok"})
      assert (await complete(address, {"prompt": "one"}))[0] == 200
      await until(lambda: server._connections._num_open <= 8)
      for _, writer in [*held, *used]:
        writer.close()
    return held

  held = asyncio.run(run())
  assert len(held) == 40 and not caplog.records


def test_a_client_that_connects_as_a_server_stops_logs_nothing(caplog):
  async def run():
    loop = asyncio.get_running_loop()
    accepting = connections.Connections(None, None, 8)
    with socket.create_server(("127.0.0.1", 0)) as listening:
      task = asyncio.create_task(accepting.accept(listening))
      for _ in range(3):
        await asyncio.sleep(0)
      with socket.create_connection(listening.getsockname()):
        # In one turn, the loop cancels the task and then notices the client.
        loop.call_soon(task.cancel)
        await asyncio.wait([task])
        await asyncio.sleep(0)
    assert task.cancelled()

  asyncio.run(run())
  assert not caplog.records


def test_connections_that_are_answered_stay_and_others_get_503(few):
  decoder = Repeating()

  async def run():
    async with serving(decoder=decoder) as (server, address):
      decoder.may_step.clear()
      asked = [
        asyncio.create_task(complete(address, {"prompt": "one"}))
        for _ in range(8)
      ]
      await until(lambda: server._connections._num_open == 8)
      await until(lambda: not server._connections._idle)
      refused = await exchange(address, http("GET", "/health"))
      decoder.may_step.set()
      return refused, await asyncio.gather(*asked)

  refused, answers = asyncio.run(run())
  assert refused == b"" or refused.startswith(b"HTTP/1.1 503 ")
  assert [status for status, _ in answers] == [200] * 8


@pytest.mark.parametrize("sent", [b"", HALF, b"G"])
def test_a_connection_without_a_request_is_closed(monkeypatch, sent):
  monkeypatch.setattr(connections, "_HEADER_SECS", 0.05)

  async def run():
    async with serving() as (_, address):
      return await exchange(address, sent)

  assert asyncio.run(run()) == b""


def test_a_connection_that_is_idle_after_an_answer_is_closed(monkeypatch):
  monkeypatch.setattr(connections, "_IDLE_SECS", 0.05)

  async def run():
    async with serving() as (_, address):
      request = http("GET", "/health", Connection=None)
      return await exchange(address, request + HALF)

  answer = asyncio.run(run())
  assert answer.count(b"HTTP/1.1 200 OK") == 1


MALFORMED = [
  b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(400),  # TLS
  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
  b"\x00\x00\x00\xa4\xffSMB" + bytes(100),
  b"SSH-2.0-OpenSSH_9.6\r\n",
  b"GET / HTTP/9.9\r\nHost: a\r\n\r\n",
  b"GET http://[::1 HTTP/1.1\r\nHost: x\r\n\r\n",
  b"GET / HTTP/1.1\r\nHost: a\r\nbad header\r\n\r\n",
  b"GET / HTTP/1.1\r\nHost: a\r\nA: " + b"a" * 10**5 + b"\r\n\r\n",
  b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
  b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
  b"Transfer-Encoding: chunked\r\n\r\n",
  b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: "
  b"application/json\r\nTransfer-Encoding: chunked\r\n\r\n"
  b"FFFFFFFFFFFFFFFFF\r\n",
]


@pytest.mark.parametrize("request_bytes", MALFORMED, ids=lambda x: repr(x[:20]))
def test_what_is_not_http_gets_a_short_answer_and_no_log_line(
  request_bytes, caplog
):
  async def run():
    async with serving() as (server, address):
      answer = await exchange(address, request_bytes)
      assert (await ask(address, "GET", "/health"))[0] == 200
      return answer, server._counters.requests[400]

  answer, counted = asyncio.run(run())
  assert answer.startswith(b"HTTP/1.1 400 ") or answer.startswith(
    b"HTTP/1.0 400"
  )
  assert len(answer) < 600 and counted == 1
  assert not caplog.records


def test_errors_of_accepting_are_one_line_and_end(monkeypatch, caplog):
  """At the limit of open files, clients wait until some are closed."""
  monkeypatch.setattr(connections, "_RETRY_SECS", 0.01)
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

  async def run():
    async with serving() as (_, address):
      # The server accepts none of these clients before this function waits.
      clients = [socket.create_connection(address) for _ in range(16)]
      held = []

      def server_finds_no_file():
        # A connection of an earlier test may be closed only now. Otherwise its
        # descriptors are free for the server.
        with pytest.raises(OSError, match="Too many open files"):
          while True:
            held.append(socket.socket())
        return caplog.records

      resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
      try:
        await until(server_finds_no_file)
        await asyncio.sleep(0.1)
      finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for each in held + clients:
          each.close()
      return await ask(address, "GET", "/health")

  assert asyncio.run(run())[0] == 200
  (record,) = caplog.records
  assert (
    record.getMessage() == "cannot accept a connection: Too many open files"
  )


def test_the_limit_is_below_the_limit_of_open_files():
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  try:
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    most = connections.raise_connection_limit()
    raised, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert 4 <= most < raised and raised <= hard
    assert most == 512 or raised == hard
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
