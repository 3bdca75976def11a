# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP server, in the form that clients of OpenAI's API speak."""

import asyncio
import signal
import socket
import threading
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from palm_mtf.errors import UserError
from palm_mtf.serving.batcher import Batcher
from palm_mtf.serving.completions import Completions, RefusalError, check_name
from palm_mtf.serving.counters import Counters
from palm_mtf.serving.served_model import ServedModel

_MOST_BODY_BYTES = 2**21
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_CLIENT_LEFT = 499  # as nginx logs it

_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Server:
  """Serves one model until a signal."""

  def __init__(self, model: ServedModel, batcher: Batcher, counters: Counters):
    """Readies a server.

    Args:
      model: model, limits and defaults.
      batcher: batch, which the server runs in a thread.
      counters: counts of the batcher.
    """
    self._model, self._batcher, self._counters = model, batcher, counters
    self._completions = Completions(model, batcher)
    self._stopped = asyncio.Event()
    self._signal = ""

  async def serve(self, listening: socket.socket) -> str:
    """Serves until a signal, and then until the last answer is sent.

    A second signal gives up what is under way.

    Args:
      listening: socket that listens.

    Returns:
      Name of the signal, such as "SIGTERM"; "" where the batch failed.
    """
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
      # What nohup, or a shell that starts a background job, has ignored stays
      # so.
      if signal.getsignal(number) != signal.SIG_IGN:
        loop.add_signal_handler(number, self._stop, signal.Signals(number).name)
    # A handler whose client went away is cancelled, and its rows with it.
    runner = web.AppRunner(
      self._app(),
      handler_cancellation=True,
      shutdown_timeout=self._model.most_secs + 1,
      access_log=None,
    )
    await runner.setup()
    await web.SockSite(runner, listening).start()
    thread = threading.Thread(target=self._run_batcher, args=[loop])
    thread.start()
    await self._stopped.wait()
    await runner.cleanup()  # waits for the answers that are under way
    self._batcher.stop()
    await asyncio.to_thread(thread.join)
    return self._signal

  def _app(self) -> web.Application:
    app = web.Application(
      client_max_size=_MOST_BODY_BYTES, middlewares=[self._counted]
    )
    app.add_routes(
      [
        web.get("/health", self._health),
        web.get("/metrics", self._metrics),
        web.get("/v1/models", self._models),
        web.get("/v1/models/{name}", self._described),
        web.post("/v1/completions", self._completions.answer),
      ]
    )
    return app

  def _run_batcher(self, loop: asyncio.AbstractEventLoop) -> None:
    self._batcher.run()
    if self._batcher.failure:
      loop.call_soon_threadsafe(self._stopped.set)

  def _stop(self, signal_name: str) -> None:
    # SIGHUP may come twice of itself, where a terminal closes.
    if self._signal and signal_name != "SIGHUP":
      self._batcher.give_up()
    self._signal = self._signal or signal_name
    self._stopped.set()

  @web.middleware
  async def _counted(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    start, status = time.monotonic(), _CLIENT_LEFT
    try:
      response = await self._answer(request, handler)
      status = response.status
      return response
    except Exception:  # is ours; aiohttp logs it
      status = 500
      raise
    finally:
      self._counters.requests[status] += 1
      self._counters.request_secs += time.monotonic() - start

  async def _answer(
    self, request: web.Request, handler: _Handler
  ) -> web.StreamResponse:
    try:
      return await handler(request)
    except (ConnectionError, TimeoutError):  # of a client that does not read
      if request.transport:
        request.transport.abort()
      return web.Response(status=_CLIENT_LEFT)
    except UserError as error:
      return RefusalError(400, str(error)).response()
    except RefusalError as refusal:
      return refusal.response()
    except web.HTTPException as error:  # no such page, a body too large
      return RefusalError(error.status, error.reason).response()

  async def _health(self, unused_request: web.Request) -> web.Response:
    if self._stopped.is_set():
      raise RefusalError(503, "this server stops.")
    return web.json_response({"status": "ok"})

  async def _metrics(self, unused_request: web.Request) -> web.Response:
    return web.Response(text=self._counters.page())

  async def _models(self, unused_request: web.Request) -> web.Response:
    models = [self._model.described()]
    return web.json_response({"object": "list", "data": models})

  async def _described(self, request: web.Request) -> web.Response:
    check_name(self._model, request.match_info["name"])
    return web.json_response(self._model.described())
