# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The manager as a gRPC server, and its queries to TensorFlow servers.

A client's stream of turns costs no thread, so thousands of clients may have
one. When a stream ends, the scheduler ends the client's programs and frees the
bytes of its buffers. gRPC's keepalive ends the stream of a silent client.
"""

import asyncio
import contextlib
import dataclasses
import functools
import itertools
import json
import math
import resource
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
from google.protobuf.empty_pb2 import Empty
from google.protobuf.unknown_fields import UnknownFieldSet
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from palm_mtf import __version__
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.addresses import ANY_ADDRESS, explain_start_error
from palm_mtf.runtime.manager.client import (
  CHANNEL_OPTIONS,
  PROTOCOL,
  SERVICE,
  TURNS,
  read_tls,
)
from palm_mtf.runtime.manager.manager import Manager, Store
from palm_mtf.runtime.manager.slices import WRONG_JSON, check_name
from palm_mtf.runtime.manager.turns import Message, Turns, read_messages
from palm_mtf.runtime.scheduler import GangScheduler
from palm_mtf.runtime.server.restricted_port import restricted_port

_METHODS = (
  "register beat leave allocate release drain list_all".split()  # of Manager
)
_NUM_THREADS = 16
# Let clients ping as often as CHANNEL_OPTIONS says; gRPC's default hangs up.
_SERVER_OPTIONS = (
  *CHANNEL_OPTIONS,
  ("grpc.keepalive_permit_without_calls", 1),
  ("grpc.http2.min_ping_interval_without_data_ms", 1000),
  ("grpc.http2.max_ping_strikes", 0),
)
_STOP_SECS = 2.0  # for requests in progress when the manager stops
_COUNT_SECS = 10.0  # timeout for asking a TensorFlow server for its devices
# From TensorFlow's own protocol (worker.proto, device_attributes.proto).
_GET_STATUS = "/tensorflow.WorkerService/GetStatus"
_DEVICE_ATTRIBUTES, _DEVICE_TYPE = 1, 2  # numbers of fields in the reply
_MAX_STREAMS = 10_000
_MAX_ANSWERS = 100_000  # more unread answers end a stream, to save memory
_WRONG = grpc.StatusCode.INVALID_ARGUMENT


@dataclasses.dataclass(eq=False)  # compared by identity, to be in a set
class _Stream:
  owner: str
  client: str  # random name of the client, to notice that it connects again
  tenant: str  # unique name of the stream in the scheduler
  # Messages for the client; None ends the stream.
  answers: asyncio.Queue[Message | None] = dataclasses.field(
    default_factory=asyncio.Queue
  )
  # Why the manager ends the stream; None if the client ends it.
  refusal: tuple[grpc.StatusCode, str] | None = None


async def check_versions(context: grpc.aio.ServicerContext) -> None:
  """Ends a call whose client has another protocol."""
  about = dict(context.invocation_metadata())
  if about.get("protocol") != str(PROTOCOL):
    await context.abort(
      grpc.StatusCode.FAILED_PRECONDITION,
      f"the manager is of palm_mtf {__version__} and you have palm_mtf "
      f"{about.get('palm_mtf')}, whose requests differ; use one version",
    )


class Streams:
  """Serves the streams, without locks: all runs in the event loop's thread."""

  def __init__(self, turns: Turns):
    self._turns = turns
    self._open: set[_Stream] = set()
    self._numbers = itertools.count()

  async def serve(
    self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext
  ) -> AsyncIterator[bytes]:
    """Answers a client's messages until the client ends its stream."""
    await check_versions(context)
    about = dict(context.invocation_metadata())
    try:
      owner, weight = about["owner"], float(about["weight"])
      check_name("owner", owner)
      if not 1e-6 <= weight <= 1e6 or math.isnan(weight):
        raise ValueError(weight)
    except (KeyError, ValueError, UserError):
      await context.abort(_WRONG, "the stream needs an owner and a weight")
    if len(self._open) >= _MAX_STREAMS:
      await context.abort(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"the manager serves {_MAX_STREAMS:,} clients, which is the most",
      )
    client = about.get("client", "")
    for other in [*self._open]:
      # The client has lost its old stream, which the manager has not noticed.
      if client and (other.owner, other.client) == (owner, client):
        self._end(other, None)
    stream = _Stream(owner, client, f"{owner} {next(self._numbers)}")
    self._open.add(stream)
    self._turns.add_client(stream.tenant, weight, stream.answers.put_nowait)
    reading = asyncio.ensure_future(self._read(stream, requests))
    try:
      yield b"[]"  # tells the client that the manager gives turns from now on
      while group := await _take_all(stream.answers):
        yield json_text(group).encode()
    finally:
      reading.cancel()
      self._end(stream, None)
    if stream.refusal:
      await context.abort(*stream.refusal)

  async def _read(
    self, stream: _Stream, requests: AsyncIterator[bytes]
  ) -> None:
    refusal = None
    try:
      async for text in requests:
        self._turns.take(stream.tenant, read_messages(text))
        if stream.answers.qsize() > _MAX_ANSWERS:
          raise UserError("the client does not read its answers.")
    except UserError as error:
      refusal = _WRONG, str(error)
    finally:
      self._end(stream, refusal)

  def _end(
    self, stream: _Stream, refusal: tuple[grpc.StatusCode, str] | None
  ) -> None:
    if stream in self._open:
      self._open.remove(stream)
      self._turns.remove_client(stream.tenant)
      stream.refusal = refusal
      stream.answers.put_nowait(None)

  def end_all(self, owner: str) -> bool:
    """Ends the streams of an owner; returns whether it had any."""
    ended = [x for x in self._open if x.owner == owner]
    for stream in ended:
      self._end(stream, (_WRONG, f"the turns of {owner} were released"))
    return bool(ended)

  def list_all(self) -> list[dict[str, Any]]:
    """Returns a JSON object per stream: its client's programs and bytes."""
    streams = sorted(self._open, key=lambda x: x.owner)
    return [
      {"client": x.owner, **self._turns.describe(x.tenant)} for x in streams
    ]


async def _take_all(answers: asyncio.Queue[Message | None]) -> list[Message]:
  """Waits for answers, to send together; returns [] once the stream ends."""
  group = [await answers.get()]
  while group[-1] is not None and not answers.empty():
    group.append(answers.get_nowait())
  if group[-1] is None and len(group) > 1:
    answers.put_nowait(None)
  return [x for x in group if x is not None]


@contextlib.contextmanager
def serve(
  ip: str, port: int, state: str, tls: str, policy: str = "fifo"
) -> Iterator[int]:
  """Answers requests to the manager while the body runs; yields the port.

  The same hosts and users may connect to the port as to a TensorFlow server
  (server/restricted_port.py).

  Args:
    ip: IPv4 address; "0.0.0.0" is every address of this host.
    port: TCP port; 0 is any free port.
    state: path of the manager's file.
    tls: PREFIX of the manager's key and certificate (`read_tls`), or "".
    policy: order of the programs of all clients, one of POLICIES.

  Raises UserError if another manager uses the file, the key cannot be used, the
  port is taken, or the system cannot limit who may connect to the port.
  """
  with contextlib.ExitStack() as stack:
    store = stack.enter_context(contextlib.closing(Store(state)))
    loop = stack.enter_context(event_loop())
    scheduler = GangScheduler(policy, {})
    streams = Streams(Turns(scheduler, lambda: manager.list_devices()))
    end_turns = functools.partial(loop.call_soon_threadsafe, streams.end_all)
    manager = Manager(store, count_devices, end_turns)
    # Let this process have as many connections as the system allows.
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
      resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    started = asyncio.run_coroutine_threadsafe(
      _start(manager, streams, ip, port, tls), loop
    )
    server, port = started.result()

    def stop() -> None:
      stopping = server.stop(_STOP_SECS)
      asyncio.run_coroutine_threadsafe(stopping, loop).result(3 * _STOP_SECS)

    stack.callback(stop)
    yield port


@contextlib.contextmanager
def event_loop() -> Iterator[asyncio.AbstractEventLoop]:
  """Runs an event loop, for gRPC, in a thread while the body runs."""
  loop = asyncio.new_event_loop()
  thread = threading.Thread(target=loop.run_forever, daemon=True)
  thread.start()
  try:
    yield loop
  finally:
    loop.call_soon_threadsafe(loop.stop)
    thread.join(_STOP_SECS)


async def _start(
  manager: Manager, streams: Streams, ip: str, port: int, tls: str
) -> tuple[grpc.aio.Server, int]:
  """Starts to answer requests; returns the server and its port."""
  server = grpc.aio.server(options=_SERVER_OPTIONS)
  calls = _Calls(manager, streams)
  handlers = {
    name: grpc.unary_unary_rpc_method_handler(
      functools.partial(calls.answer, name)
    )
    for name in _METHODS
  }
  handlers[TURNS] = grpc.stream_stream_rpc_method_handler(streams.serve)
  server.add_generic_rpc_handlers(
    [grpc.method_handlers_generic_handler(SERVICE, handlers)]
  )
  healthy = health.aio.HealthServicer()  # health checks ask for "" or SERVICE
  health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
  await healthy.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
  port = _listen(server, ip, port, tls)
  await server.start()
  calls.tick()
  return server, port


def _listen(server: grpc.aio.Server, ip: str, port: int, tls: str) -> int:
  """Makes a server listen on a port, with access only through `ip`.

  `tls` is the PREFIX of its key and certificate, which clients need, too; or
  "".
  """
  both = read_tls(tls) if tls else None
  try:
    with contextlib.ExitStack() as stack:
      if ip != ANY_ADDRESS:
        port = stack.enter_context(restricted_port(ip, port))
      where = f"{ANY_ADDRESS}:{port}"
      if not both:
        return server.add_insecure_port(where)
      return server.add_secure_port(
        where, grpc.ssl_server_credentials([both], both[1], True)
      )
  except (OSError, RuntimeError) as error:
    raise explain_start_error(f"{ip}:{port}", error) from None


class _Calls:
  """Answers gRPC calls; threads run the manager's methods, which may block."""

  def __init__(self, manager: Manager, streams: Streams):
    self._manager, self._streams = manager, streams
    self._threads = ThreadPoolExecutor(_NUM_THREADS)
    # A server that does not answer holds a thread for _COUNT_SECS, and must not
    # delay the other methods.
    self._registering = ThreadPoolExecutor(_NUM_THREADS)

  def tick(self) -> None:
    """Ticks every second: a late tick shows that this process was suspended."""
    self._threads.submit(self._manager.tick)
    asyncio.get_running_loop().call_later(1.0, self.tick)

  async def answer(
    self, method: str, request: bytes, context: grpc.aio.ServicerContext
  ) -> bytes:
    """Returns a request's result as JSON, or ends the call with an error."""
    await check_versions(context)
    try:
      found = await self._call(method, json.loads(request))
      return json_text(found).encode()
    except UserError as error:
      code, why = grpc.StatusCode.INVALID_ARGUMENT, str(error)
    except WRONG_JSON:
      code, why = grpc.StatusCode.INTERNAL, "no request of palm_mtf"
    await context.abort(code, why)
    raise AssertionError  # abort raises an exception

  async def _call(self, method: str, arguments: dict[str, Any]) -> Any:
    had_turns = method == "release" and self._streams.end_all(
      arguments["owner"]
    )
    threads = self._registering if method == "register" else self._threads
    call = functools.partial(getattr(self._manager, method), **arguments)
    try:
      found = await asyncio.get_running_loop().run_in_executor(threads, call)
    except UserError:
      if not had_turns:  # an owner may have streams but no slices
        raise
      return None
    return found + self._streams.list_all() if method == "list_all" else found


def count_devices(address: str) -> int:
  """Asks a server how many CPU devices it has; UserError if it is silent."""
  try:
    with grpc.insecure_channel(address, CHANNEL_OPTIONS) as channel:
      reply = channel.unary_unary(_GET_STATUS)(b"", timeout=_COUNT_SECS)
  except grpc.RpcError:
    raise UserError(
      f"no TensorFlow server answers the manager at {address}; start the "
      "server at an address that the manager reaches (--listen)."
    ) from None
  devices = [x for number, x in _fields(reply) if number == _DEVICE_ATTRIBUTES]
  return sum((_DEVICE_TYPE, b"CPU") in _fields(x) for x in devices)


def _fields(message: bytes) -> list[tuple[int, Any]]:
  """Returns (number, value) per field of a protobuf message of unknown type."""
  fields = UnknownFieldSet(Empty.FromString(message))
  return [(x.field_number, x.data) for x in fields]
