# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""HTTP server for clients of OpenAI's API."""

import asyncio
import functools
import math
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from concurrent import futures
from typing import TypeVar

from aiohttp import web

from palm_mtf.errors import UserError
from palm_mtf.generation.serving.access import Access
from palm_mtf.generation.serving.adapters import NamedAdapter
from palm_mtf.generation.serving.batcher import Batcher, FullError
from palm_mtf.generation.serving.completion_request import CompletionRequest
from palm_mtf.generation.serving.connections import (
  Connections,
  raise_connection_limit,
)
from palm_mtf.generation.serving.counters import Counters
from palm_mtf.generation.serving.messages import (
  MOST_BODY_BYTES,
  RefusalError,
  make_json_response,
  read_json,
)
from palm_mtf.generation.serving.served_model import Choice, ServedModel
from palm_mtf.json_text import json_text
from palm_mtf.machine.process import handled_signals
from palm_mtf.machine.wakeups import shorten_slice

# request[_CLIENT] is the sender: its API key's index, or its network.
_CLIENT = web.RequestKey("client", str)
# If a request's prompts together have more characters or ids than this number,
# another thread encodes the prompts, so that other requests need not wait.
_LONG = 10_000
_STACK_BYTES = 2**28  # address space, of which only a deep call uses much
_CLIENT_LEFT = 499  # nginx's status for a client that disconnected
_HEALTH, _CHAT = "/health", "/v1/chat/completions"

_Found = TypeVar("_Found")
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class _Completions:
  """Answers requests for completions, whole or as a stream of events."""

  def __init__(self, model: ServedModel, batcher: Batcher):
    self._model, self._batcher = model, batcher
    # One thread renders the chat template, for one conversation at a time. If
    # this is slow, only conversations wait, and no other thread is kept busy.
    self._chat_thread = futures.ThreadPoolExecutor(1)
    # Another thread compiles grammars, for the same reason. It has a large
    # stack, because compilation recurses as deep as a schema refers to itself.
    default = threading.stack_size(_STACK_BYTES)
    self._grammar_thread = futures.ThreadPoolExecutor(1)
    self._grammar_thread.submit(int).result()
    threading.stack_size(default)

  async def answer(self, request: web.Request) -> web.StreamResponse:
    """Answers one request.

    Raises RefusalError if the request is wrong or cannot be served now.
    """
    body = await read_json(request, self._model.most_secs)
    name = body.get("model") if isinstance(body, dict) else None
    adapter = self._model.find_adapter(name)
    is_chat = request.path == _CHAT
    loop = asyncio.get_running_loop()
    read = functools.partial(
      self._model.read, body, is_chat=is_chat, adapter=adapter
    )
    asked = (
      await self._wait_for(
        self._chat_thread.submit(read),
        "the chat template takes",
        "other conversations take",
      )
      if is_chat
      else read()
    )
    changed = asyncio.Event()
    begin = functools.partial(
      self._model.make_choices,
      asked,
      request[_CLIENT],
      functools.partial(_set, changed, loop, threading.get_ident()),
    )
    is_long = sum(map(len, asked.prompts)) > _LONG
    if asked.grammar:
      choices = await self._wait_for(
        self._grammar_thread.submit(begin),
        "the schema takes",
        "other schemas take",
      )
    else:
      choices = await asyncio.to_thread(begin) if is_long else begin()
    rows = [choice.row for choice in choices]
    try:
      self._batcher.submit(rows)
    except FullError:
      raise RefusalError(
        429, "too many completions are waiting; try again later."
      ) from None
    try:
      if asked.stream:
        return await self._stream(request, asked, choices, changed)
      return await self._answer_whole(self._make_head(asked), choices, changed)
    finally:
      # If the client has disconnected, this frees the slots. Rows that have
      # ended do not change.
      self._batcher.cancel(rows)

  async def _wait_for(
    self, found: "futures.Future[_Found]", what: str, others: str
  ) -> _Found:
    # Returns the result of a call in a thread that requests share. If the call
    # takes too long, the error names `what`, or `others` if they kept the
    # thread.
    try:
      async with asyncio.timeout(self._model.most_secs):
        return await asyncio.wrap_future(found)
    except TimeoutError:
      # A timeout cannot cancel a call that runs. So if `found` is cancelled, it
      # was still waiting for the thread.
      which = others if found.cancelled() else what
      raise RefusalError(503, f"{which} too long.") from None

  async def _answer_whole(
    self, head: dict, choices: Sequence[Choice], changed: asyncio.Event
  ) -> web.Response:
    await self._wait(choices, changed)
    await self._check(choices)
    found = [choice.read() for choice in choices]
    usage = _count_tokens(choices)
    return make_json_response({**head, "choices": found, "usage": usage})

  async def _wait(
    self, choices: Sequence[Choice], changed: asyncio.Event
  ) -> None:
    unfinished = list(choices)
    while unfinished:
      await changed.wait()
      changed.clear()
      unfinished = [x for x in unfinished if not self._is_over(x)]

  async def _check(self, choices: Sequence[Choice]) -> None:
    """Lets a thread check an answer; waits for it only if it may refuse."""
    assertions = self._model.assertions
    # If a request only scores its prompt, the model writes nothing.
    if not assertions or not choices[0].row.asked.max_tokens:
      return
    examples = [x.as_example() for x in choices]
    checked = assertions.submit(examples, self._batcher.engine.step)
    if not assertions.refused:
      return
    if not checked:
      raise RefusalError(503, "too many answers wait to be checked.")
    severities = await self._wait_for(
      checked, "the assertions take", "checks of other answers take"
    )
    for name, found in severities.items():
      if max(found) >= assertions.refused.get(name, math.inf):
        raise RefusalError(
          422,
          f"the assertion {name!r} refuses the answer (severity "
          f"{max(found):g}); ask for another.",
        )

  def _is_over(self, choice: Choice) -> bool:
    _check_choice(choice)
    is_over = choice.is_over()
    if is_over:  # the batcher does not know stop strings, so end the row
      self._batcher.cancel([choice.row])
    return is_over

  async def _stream(
    self,
    request: web.Request,
    asked: CompletionRequest,
    choices: Sequence[Choice],
    changed: asyncio.Event,
  ) -> web.StreamResponse:
    head = self._make_head(asked)
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    response.headers["Cache-Control"] = "no-cache"

    async def send(event: str) -> None:
      # Send the HTTP status only with the first event, because an error before
      # the first event needs another status. The timeout is for a client that
      # does not read.
      async with asyncio.timeout(self._model.most_secs):
        if not response.prepared:
          await response.prepare(request)
        await response.write(f"data: {event}\n\n".encode())

    # Text that was sent cannot be refused, so check all before sending any.
    assertions = self._model.assertions
    if refuses := bool(assertions and assertions.refused):
      await self._wait(choices, changed)
      await self._check(choices)
      changed.set()
    unfinished = list(choices)
    try:
      while unfinished:
        await changed.wait()
        changed.clear()
        for choice in list(unfinished):
          _check_choice(choice)
          part = choice.read()
          if part:
            await send(json_text({**head, "choices": [part]}))
          if part and part["finish_reason"]:
            self._batcher.cancel([choice.row])
            unfinished.remove(choice)
      if not refuses:
        await self._check(choices)
      if asked.include_usage:
        usage = _count_tokens(choices)
        await send(json_text({**head, "choices": [], "usage": usage}))
      await send("[DONE]")
    except RefusalError as refusal:
      if not response.prepared:
        raise
      await send(json_text(refusal.as_json()))
    await response.write_eof()
    return response

  def _make_head(self, asked: CompletionRequest) -> dict:
    kind = "text_completion"
    if asked.is_chat:
      kind = "chat.completion.chunk" if asked.stream else "chat.completion"
    return {
      "id": f"{'chat' if asked.is_chat else ''}cmpl-{uuid.uuid4().hex}",
      "object": kind,
      "created": int(time.time()),
      "model": asked.adapter.name if asked.adapter else self._model.name,
    }


def _set(
  event: asyncio.Event, loop: asyncio.AbstractEventLoop, thread: int
) -> None:
  # Sets an event of a loop that runs in `thread`; for calls from any thread.
  if threading.get_ident() == thread:
    event.set()
  else:
    loop.call_soon_threadsafe(event.set)


def _check_choice(choice: Choice) -> None:
  row = choice.row
  if row.ended == "failed":
    raise RefusalError(503, "this server is stopping.")
  if row.ended == "complex":
    raise RefusalError(
      400,
      f"{row.asked.grammar.field}: became too complex after "
      f"{len(row.chosen):,} tokens; simplify it.",
    )
  if row.ended == "time" and not row.chosen:
    raise RefusalError(
      503, "the time limit passed before the first token; try again later."
    )


def _count_tokens(choices: Sequence[Choice]) -> dict[str, int]:
  # Count a prompt once, though its completions (`n`) share it.
  prompts = {id(x.row.prompt): x.num_prompt_tokens for x in choices}
  found = {
    "prompt_tokens": sum(prompts.values()),
    "completion_tokens": sum(choice.num_tokens for choice in choices),
  }
  return {**found, "total_tokens": sum(found.values())}


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
    *,
    loads_adapters: bool = False,
  ):
    # `counters` are the batcher's counters, to which the server adds requests.
    # `loads_adapters` says whether clients may load and unload adapters.
    self._loads_adapters = loads_adapters
    # Loads take turns in one thread, so that no prompt waits.
    self._loading_thread = futures.ThreadPoolExecutor(1)
    self._model, self._batcher, self._counters = model, batcher, counters
    self._access = access
    if model.assertions:
      counters.assertions = model.assertions.results
    self._completions = _Completions(model, batcher)
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
      loop.add_signal_handler(number, self._take_signal, number)
    # If a client disconnects, aiohttp cancels the handler of the client's
    # request, and the handler cancels the request's rows.
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
    loop.add_reader(self._batcher.feed, self._batcher.take_tokens)
    # The batcher's steps use all cores. Without this, the event loop would send
    # tokens only when a core is free.
    shorten_slice()
    ready()
    await self._stopped.wait()
    accepting.cancel()
    await asyncio.wait([accepting])
    listening.close()
    await runner.cleanup()  # waits for unfinished answers
    self._batcher.stop()
    if self._model.assertions:
      self._model.assertions.close()
    await asyncio.to_thread(thread.join)
    loop.remove_reader(self._batcher.feed)
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
        web.post(_CHAT, self._completions.answer),
      ]
    )
    if self._loads_adapters:
      assert self._model.adapters
      for verb, change, done in (
        ("load", self._model.adapters.load, "added"),
        ("unload", self._model.adapters.unload, "removed"),
      ):
        page = functools.partial(self._change_adapters, change, done)
        app.router.add_post(f"/v1/{verb}_lora_adapter", page)
    return app

  async def _change_adapters(
    self, change: Callable[[object], str], done: str, request: web.Request
  ) -> web.Response:
    # Calls a method of ServedAdapters; the answer has the form of vLLM's.
    body = await read_json(request, self._model.most_secs)
    loading = self._loading_thread.submit(change, body)
    name = await asyncio.wrap_future(loading)
    return web.Response(
      text=f"Success: LoRA adapter '{name}' {done} successfully."
    )

  def _run_batcher(self, loop: asyncio.AbstractEventLoop) -> None:
    self._batcher.run()
    if self._batcher.failure:
      loop.call_soon_threadsafe(self._stopped.set)

  def _take_signal(self, number: signal.Signals) -> None:
    # A second signal ends the process, whatever its threads do. SIGHUP does
    # not, because a closing terminal may send it twice.
    if self._signal and number != signal.SIGHUP:
      os._exit(128 + number)
    self.stop(number.name)

  def stop(self, signal_name: str) -> None:
    """Stops serving once the last answer is sent."""
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
        request[_CLIENT] = self._access.find_client(request)
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
    adapters = self._model.adapters.list_all() if self._model.adapters else []
    entries = [self._describe(each) for each in (None, *adapters)]
    return make_json_response({"object": "list", "data": entries})

  async def _answer_model(self, request: web.Request) -> web.Response:
    found = self._model.find_adapter(request.match_info["name"])
    return make_json_response(self._describe(found))

  def _describe(self, adapter: NamedAdapter | None) -> dict:
    engine = self._batcher.engine
    return self._model.describe(
      adapter, step=engine.step, created=engine.created
    )
