# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP server for clients of OpenAI's API."""

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from palm_mtf.errors import UserError
from palm_mtf.generation.serving.access import Access
from palm_mtf.generation.serving.batcher import Batcher, Counters
from palm_mtf.generation.serving.completions import (
  CLIENT,
  Completions,
  check_name,
)
from palm_mtf.generation.serving.connections import (
  Connections,
  raise_connection_limit,
)
from palm_mtf.generation.serving.messages import (
  MOST_BODY_BYTES,
  RefusalError,
  make_json_response,
)
from palm_mtf.generation.serving.served_model import ServedModel
from palm_mtf.machine.stop_signals import handled_signals

_CLIENT_LEFT = 499  # nginx's status for a client that disconnected
_HEALTH = "/health"

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
  """Serves one model until a signal stops the server.

  In a thread other than the main thread, signals do not stop the server.
  """

  def __init__(
    self,
    model: ServedModel,
    batcher: Batcher,
    counters: Counters,
    access: Access,
  ):
    # `counters` are the batcher's counters, to which the server adds requests.
    self._model, self._batcher, self._counters = model, batcher, counters
    self._access = access
    self._completions = Completions(model, batcher)
    self._connections: Connections | None = None
    self._stopped = asyncio.Event()
    self._signal = ""

  async def serve(
    self, listening: socket.socket, ready: Callable[[], None] = lambda: None
  ) -> str:
    """Serves until a signal comes, and then until the last answer is sent.

    Args:
      listening: socket that listens for connections.
      ready: called once, when the server accepts connections.

    Returns:
      The name of the signal, such as "SIGTERM"; "" if the batcher failed.
    """
    loop = asyncio.get_running_loop()
    for number in handled_signals():
      loop.add_signal_handler(number, self.stop, number.name)
    # If a client disconnects, aiohttp cancels the handler of its request, which
    # cancels the request's rows.
    runner = web.AppRunner(
      self._make_app(),
      handler_cancellation=True,
      shutdown_timeout=self._model.most_secs + 1,
    )
    await runner.setup()
    self._connections = Connections(
      runner.server, self._counters, raise_connection_limit()
    )
    accepting = asyncio.create_task(self._connections.accept(listening))
    thread = threading.Thread(target=self._run_batcher, args=[loop])
    thread.start()
    ready()
    await self._stopped.wait()
    accepting.cancel()
    await asyncio.wait([accepting])
    listening.close()
    await runner.cleanup()  # waits for unfinished answers
    self._batcher.stop()
    await asyncio.to_thread(thread.join)
    return self._signal

  def _make_app(self) -> web.Application:
    app = web.Application(
      client_max_size=MOST_BODY_BYTES, middlewares=[self._count]
    )
    app.add_routes(
      [
        web.get(_HEALTH, self._answer_health),
        web.get("/metrics", self._answer_metrics),
        web.get("/v1/models", self._answer_models),
        web.get("/v1/models/{name}", self._answer_model),
        web.post("/v1/completions", self._completions.answer),
      ]
    )
    return app

  def _run_batcher(self, loop: asyncio.AbstractEventLoop) -> None:
    self._batcher.run()
    if self._batcher.failure:
      loop.call_soon_threadsafe(self._stopped.set)

  def stop(self, signal_name: str) -> None:
    """Stops serving; a second call aborts unfinished answers."""
    # SIGHUP aborts nothing, because a closing terminal may send it twice.
    if self._signal and signal_name != "SIGHUP":
      self._batcher.give_up()
    self._signal = self._signal or signal_name
    self._stopped.set()

  @web.middleware
  async def _count(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    start, status = time.monotonic(), _CLIENT_LEFT
    self._connections.begin(request.protocol)
    try:
      response = await self._answer(request, handler)
      status = response.status
      return response
    except Exception:  # a bug of this server; aiohttp logs it
      status = 500
      raise
    finally:
      self._connections.end(request.protocol)
      self._counters.requests[status] += 1
      self._counters.request_secs += time.monotonic() - start

  async def _answer(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    try:
      response = await self._check_and_handle(request, handler)
      async with asyncio.timeout(self._model.most_secs):
        await response.prepare(request)
        await response.write_eof()
      return response
    except (ConnectionError, TimeoutError):  # the client left or does not read
      if request.transport:
        request.transport.abort()
      return web.Response(status=_CLIENT_LEFT)

  async def _check_and_handle(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    try:
      self._access.check_host(request)
      # Health checks need no key, so that monitoring programs can make them.
      if request.path != _HEALTH:
        request[CLIENT] = self._access.find_client(request)
      return await handler(request)
    except UserError as error:
      return RefusalError(400, str(error)).make_response()
    except RefusalError as refusal:
      return refusal.make_response()
    except web.HTTPException as error:  # such as 404 for an unknown path
      return RefusalError(error.status, error.reason).make_response()

  async def _answer_health(self, unused_request: web.Request) -> web.Response:
    if self._stopped.is_set():
      raise RefusalError(503, "this server is stopping.")
    return make_json_response({"status": "ok"})

  async def _answer_metrics(self, unused_request: web.Request) -> web.Response:
    return web.Response(text=self._counters.format_page())

  async def _answer_models(self, unused_request: web.Request) -> web.Response:
    return make_json_response(
      {"object": "list", "data": [self._describe_model()]}
    )

  async def _answer_model(self, request: web.Request) -> web.Response:
    check_name(self._model, request.match_info["name"])
    return make_json_response(self._describe_model())

  def _describe_model(self) -> dict:
    engine = self._batcher.engine
    return self._model.describe(step=engine.step, created=engine.created)
