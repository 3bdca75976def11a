# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Limits the number and the idle time of a server's connections."""

import asyncio
import contextlib
import logging
import os
import resource
import socket

from aiohttp import http_exceptions, web

from palm_mtf.errors import shorten
from palm_mtf.generation.serving.counters import Counters
from palm_mtf.generation.serving.messages import (
  MALFORMED,
  WRONGLY_CODED,
  RefusalError,
  refuse_coding,
)

_logger = logging.getLogger(__name__)

# A connection holds at most one body of 2 MiB, so all hold at most 1 GiB.
_MOST_CONNECTIONS = 512
# File descriptors that are reserved for checkpoints, threads and sockets that
# are being refused.
_SPARE_FILES = 32
_FEWEST_CONNECTIONS = 4  # so that a server with a low limit still answers

_HEADER_SECS = 10  # at most from connecting to the first request's last header
_IDLE_SECS = 75  # at most between requests; most proxies close first, at 60
_RETRY_SECS = 1  # pause after an error before accept() is called again

_FULL = (
  b"HTTP/1.1 503 Service Unavailable\r\nRetry-After: 1\r\n"
  b"Content-Length: 0\r\nConnection: close\r\n\r\n"
)


def raise_connection_limit() -> int:
  """Raises the soft limit of open files; returns how many connections fit."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  reserved = len(os.listdir("/proc/self/fd")) + _SPARE_FILES
  wanted = reserved + _MOST_CONNECTIONS
  if soft != resource.RLIM_INFINITY and soft < wanted:
    if hard != resource.RLIM_INFINITY:
      wanted = min(wanted, hard)
    with contextlib.suppress(OSError, ValueError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
      soft = wanted
  if soft == resource.RLIM_INFINITY:
    return _MOST_CONNECTIONS
  return min(_MOST_CONNECTIONS, max(_FEWEST_CONNECTIONS, soft - reserved))


async def _wait_for_client(listening: socket.socket) -> None:
  # Do not call the event loop's `sock_accept`, which logs a traceback if a
  # client connects while the call is being cancelled.
  loop = asyncio.get_running_loop()
  connected = asyncio.Event()
  loop.add_reader(listening, connected.set)
  try:
    await connected.wait()
  finally:
    loop.remove_reader(listening)


class Connections:
  """Accepts connections up to a limit.

  A connection is idle while none of its requests is being answered. At the
  limit, a new connection closes the connection that has been idle longest.
  """

  def __init__(self, server: web.Server, counters: Counters, most: int):
    self._server, self._counters, self._most = server, counters, most
    self._num_open = 0
    # Idle connections, the longest idle first. The value is a timer that closes
    # the connection if its first request is late; None after that request.
    self._idle: dict[asyncio.Protocol, asyncio.TimerHandle | None] = {}

  async def accept(self, listening: socket.socket) -> None:
    """Accepts connections until the task is cancelled."""
    loop = asyncio.get_running_loop()
    listening.setblocking(False)
    last_error = None
    while True:
      try:
        accepted, _ = listening.accept()
        accepted.setblocking(False)
        if self._has_room():
          await loop.connect_accepted_socket(self._make_connection, accepted)
        else:
          with contextlib.suppress(OSError), accepted:
            accepted.send(_FULL)
          await asyncio.sleep(0)
      except BlockingIOError:
        await _wait_for_client(listening)
      except OSError as error:  # such as too many open files in the system
        if error.errno != last_error:
          _logger.warning(f"cannot accept a connection: {error.strerror}")
        last_error = error.errno
        await asyncio.sleep(_RETRY_SECS)

  def begin(self, connection: asyncio.Protocol) -> None:
    """Notes that a connection is not idle: its request is being answered."""
    timer = self._idle.pop(connection, None)
    if timer:
      timer.cancel()

  def end(self, connection: asyncio.Protocol) -> None:
    """Notes that a connection is idle again."""
    if isinstance(connection, _Connection) and connection.transport:
      self._idle[connection] = None

  def add(self, connection: "_Connection") -> None:
    """Counts a new connection, and limits the time until its first request."""
    self._num_open += 1
    loop = asyncio.get_running_loop()
    self._idle[connection] = loop.call_later(
      _HEADER_SECS, self._abort, connection
    )

  def remove(self, connection: "_Connection") -> None:
    """Removes a connection that was closed."""
    self._num_open -= 1
    self.begin(connection)

  def count_refused(self, refusal: RefusalError) -> None:
    """Counts, for /metrics, a request that reaches no handler of the server."""
    self._counters.requests[refusal.status] += 1

  def _make_connection(self) -> "_Connection":
    return _Connection(
      self,
      self._server,
      loop=asyncio.get_running_loop(),
      keepalive_timeout=_IDLE_SECS,
      access_log=None,
    )

  def _has_room(self) -> bool:
    if self._num_open < self._most:
      return True
    longest_idle = next(iter(self._idle), None)
    if longest_idle:
      self._abort(longest_idle)
    return longest_idle is not None

  def _abort(self, connection: web.RequestHandler) -> None:
    self.begin(connection)
    if connection.transport:
      # Do not call close(), which would wait for a client that does not read.
      connection.transport.abort()


class _Connection(web.RequestHandler):
  __slots__ = ("_connections",)

  def __init__(
    self, connections: Connections, server: web.Server, **options: object
  ):
    super().__init__(server, **options)
    self._connections = connections

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    super().connection_made(transport)
    self._connections.add(self)

  def connection_lost(self, exc: BaseException | None) -> None:
    super().connection_lost(exc)
    self._connections.remove(self)

  def log_exception(self, *args: object, **kw: object) -> None:
    # Log no traceback for TLS or HTTP/2 on this port, a port scanner, or a body
    # that cannot be decoded, because clients could fill the disk with logs.
    if not isinstance(kw.get("exc_info"), MALFORMED):
      super().log_exception(*args, **kw)

  def handle_error(
    self,
    request: web.BaseRequest,
    status: int = 500,
    exc: BaseException | None = None,
    message: str | None = None,
  ) -> web.StreamResponse:
    if not isinstance(exc, MALFORMED):
      return super().handle_error(request, status, exc, message)
    why = exc.message.partition("\n")[0][:80]
    refusal = RefusalError(400, f"this is not an HTTP/1.1 request: {why}")
    if isinstance(exc, http_exceptions.ContentEncodingError):
      # If the encoding's decoder is not installed, aiohttp's error asks for it.
      if "Please install" in why:
        refusal = refuse_coding("this Content-Encoding")
      else:
        refusal = RefusalError(400, WRONGLY_CODED)
    self._connections.count_refused(refusal)
    answer = refusal.make_response()
    answer.force_close()
    return answer

  async def finish_response(
    self,
    request: web.BaseRequest,
    resp: web.StreamResponse,
    start_time: float | None,
  ) -> tuple[web.StreamResponse, bool]:
    # aiohttp answers an unknown Expect header in plain text; answer in JSON.
    if isinstance(resp, web.HTTPExpectationFailed):
      given = shorten(request.headers["Expect"])
      refusal = RefusalError(
        417, f"Expect: {given} is not supported; leave it out."
      )
      self._connections.count_refused(refusal)
      resp = refusal.make_response()
    return await super().finish_response(request, resp, start_time)
