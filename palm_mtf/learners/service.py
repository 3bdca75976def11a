# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The gRPC server of a run's learners, some of which may be malicious.

Every call needs TLS and a token. A learner may make one call at a time, and
each call has a deadline, so that a learner can use no more of this process's
memory than the arrays of its result need, and only for a limited time. Chunks
are read one by one.
"""

import asyncio
import contextlib
import functools
import logging
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc

from palm_mtf.errors import UserError
from palm_mtf.learners.gate import MOST_CONNECTIONS, open_gate
from palm_mtf.learners.members import Members
from palm_mtf.learners.protocol import (
  CHUNK_BYTES,
  Message,
  MessageReader,
  Spec,
  at_most,
  check_same,
  write_chunks,
)
from palm_mtf.runtime.manager.client import CHANNEL_OPTIONS, read_tls
from palm_mtf.runtime.manager.service import event_loop
from palm_mtf.runtime.manager.slices import WRONG_JSON

if TYPE_CHECKING:  # the module imports TensorFlow
  from palm_mtf.learners.decoupled import DecoupledHandler

_logger = logging.getLogger(__name__)

SERVICE, TOKEN = "palm_mtf.Learners", "token"
METHODS = ("join", "next", "contribute")
_MOST_CALLS = 256
# A learner may make _CALLS_PER_SEC calls on average, and _BURST at once.
_CALLS_PER_SEC, _BURST = 5.0, 20.0
# A message may take _SECS, and the time of its bytes at _BYTES_PER_SEC.
_SECS, _BYTES_PER_SEC = 60.0, 2**16
_NUM_THREADS = 16
_MOST_CONNECTION_MS = 3_600_000
# At _BYTES_PER_SEC, a ping may wait for 4 MB in the buffers of both ends.
_PONG_MS = 60_000
_LINK = {
  "grpc.max_receive_message_length": CHUNK_BYTES,
  "grpc.keepalive_timeout_ms": _PONG_MS,
  "grpc.http2.ping_timeout_ms": _PONG_MS,
}
# Options of both ends of a connection.
LINK_OPTIONS = tuple((dict(CHANNEL_OPTIONS) | _LINK).items())
_OPTIONS = (
  *LINK_OPTIONS,
  ("grpc.max_metadata_size", 2**13),
  ("grpc.max_concurrent_streams", 4),
  ("grpc.max_allowed_incoming_connections", MOST_CONNECTIONS),
  ("grpc.max_connection_idle_ms", 30_000),
  ("grpc.max_connection_age_ms", _MOST_CONNECTION_MS),
  ("grpc.max_connection_age_grace_ms", _MOST_CONNECTION_MS),
  ("grpc.server_handshake_timeout_ms", 5_000),
  # Let learners ping as often as CHANNEL_OPTIONS says.
  ("grpc.keepalive_permit_without_calls", 1),
  ("grpc.http2.min_ping_interval_without_data_ms", 1000),
)


def check_key(tls: str) -> None:
  """Raises UserError unless LEARNERS_TLS = `tls` names a usable key."""
  if not tls:
    raise UserError(
      'LEARNERS_TLS = "": learners connect by TLS; give the PREFIX of '
      "PREFIX.key and PREFIX.pem, as docs/slow_links.md makes them."
    )
  read_tls(tls)


@contextlib.contextmanager
def serve(
  ip: str, port: int, tls: str, members: Members, handler: "DecoupledHandler"
) -> Iterator[int]:
  """Answers learners while the body runs; yields the port.

  Args:
    ip: IPv4 address of this host; a loopback address admits only this user.
    port: TCP port; 0 is any free port.
    tls: PREFIX of the run's key and certificate; learners need the certificate.
    members: who may call.
    handler: answers the calls.

  Raises UserError if the key cannot be used or the port is taken.
  """
  check_key(tls)
  with event_loop() as loop:

    def run(coroutine: Any) -> Any:
      return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    with _socket_path() as socket:
      server = run(_start(socket, tls, _Calls(members, handler)))
      try:
        gate = run(open_gate(socket, ip, port))
        try:
          yield gate.sockets[0].getsockname()[1]
        finally:
          loop.call_soon_threadsafe(gate.close)
      finally:
        run(server.stop(2.0))


@contextlib.contextmanager
def _socket_path() -> Iterator[str]:
  """Yields a path for a Unix socket, which only this user can reach.

  The path is as short as that of a socket has to be, even if TMPDIR is long.
  """
  with tempfile.TemporaryDirectory() as folder:
    number = os.open(folder, os.O_RDONLY)
    try:
      yield f"/proc/self/fd/{number}/learners"
    finally:
      os.close(number)


async def _start(socket: str, tls: str, calls: "_Calls") -> grpc.aio.Server:
  """Starts to answer calls at the Unix socket `socket`."""
  server = grpc.aio.server(
    options=_OPTIONS, maximum_concurrent_rpcs=_MOST_CALLS
  )
  handlers = {
    x: grpc.stream_stream_rpc_method_handler(functools.partial(calls.answer, x))
    for x in METHODS
  }
  server.add_generic_rpc_handlers(
    [grpc.method_handlers_generic_handler(SERVICE, handlers)]
  )
  key = grpc.ssl_server_credentials([read_tls(tls)])
  server.add_secure_port(f"unix:{socket}", key)
  await server.start()
  return server


class _Calls:
  """Answers calls in the event loop's thread; threads run the handler."""

  def __init__(self, members: Members, handler: "DecoupledHandler"):
    self._members, self._handler = members, handler
    self._threads = ThreadPoolExecutor(_NUM_THREADS)
    self._busy: set[str] = set()
    self._said = ""  # the reason, already logged, why no learner is admitted
    # {member: (calls left, when that was counted)}
    self._budgets: dict[str, tuple[float, float]] = {}

  async def answer(
    self,
    method: str,
    requests: AsyncIterator[bytes],
    context: grpc.aio.ServicerContext,
  ) -> None:
    """Reads a message; writes the chunks of the answer."""
    code = grpc.StatusCode
    about = dict(context.invocation_metadata())
    member = await self._find(str(about.get(TOKEN, "")), context)
    if member in self._busy or not self._take_call(member):
      await context.abort(code.RESOURCE_EXHAUSTED, "too many calls; wait")
    self._busy.add(member)
    try:
      message = await self._read(method, member, requests)
      given = message if method == "contribute" else message.header
      reply = await self._run(getattr(self._handler, method), member, given)
      await self._write(reply, context)
    except UserError as error:
      _logger.warning(f"{member}: {error}")
      await context.abort(code.INVALID_ARGUMENT, str(error)[:1000])
    except WRONG_JSON as error:
      _logger.warning(f"{member}: a wrong header ({error!r:.200})")
      await context.abort(code.INVALID_ARGUMENT, "a wrong header")
    except TimeoutError:
      _logger.warning(f"{member}: a message takes too long")
      await context.abort(code.DEADLINE_EXCEEDED, "the message takes too long")
    finally:
      self._busy.discard(member)

  async def _find(self, token: str, context: grpc.aio.ServicerContext) -> str:
    """Returns the name of the learner that has a token, or ends the call."""
    try:
      member = self._members.find(token)
    except UserError as error:
      if str(error) != self._said:  # once, or strangers could fill the log
        self._said = str(error)
        _logger.warning(f"no learner is admitted: {error}")
      # A learner tries again for some minutes.
      await context.abort(grpc.StatusCode.UNAVAILABLE, "try again")
    self._said = ""
    if member is None:
      await context.abort(
        grpc.StatusCode.UNAUTHENTICATED, "no learner has this token"
      )
    assert member is not None
    return member

  async def _read(
    self, method: str, member: str, requests: AsyncIterator[bytes]
  ) -> Message:
    chunks = aiter(requests)
    async with asyncio.timeout(_SECS):
      first = await anext(chunks, b"")

    def check(header: dict[str, Any], given: Mapping[str, Spec]) -> None:
      check_same(self._handler.expect(member, header), given)

    is_result = method == "contribute"
    reader: MessageReader = await self._run(
      MessageReader, first, check if is_result else at_most(0)
    )
    async with asyncio.timeout_at(_deadline(reader.num_bytes)):
      async for chunk in chunks:
        reader.take(chunk)
    return reader.end()

  async def _write(
    self, reply: Message, context: grpc.aio.ServicerContext
  ) -> None:
    size = sum(x.nbytes for x in reply.arrays.values())
    try:
      async with asyncio.timeout_at(_deadline(size)):
        for chunk in write_chunks(reply):
          await context.write(chunk)  # waits while the learner does not read
    except TimeoutError:
      # While a chunk waits, gRPC can send no status. One chunk stays in memory
      # until the connection ends.
      raise asyncio.CancelledError from None

  async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(self._threads, function, *arguments)

  def _take_call(self, member: str) -> bool:
    """Notes a call; returns whether the learner's rate allows it."""
    now = time.monotonic()
    left, at = self._budgets.get(member, (_BURST, now))
    left = min(_BURST, left + _CALLS_PER_SEC * (now - at))
    self._budgets[member] = max(0.0, left - 1), now
    return left >= 1


def _deadline(size: int) -> float:
  return time.monotonic() + _SECS + size / _BYTES_PER_SEC
