# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Answers to POST /v1/completions, whole or as a stream of events."""

import asyncio
import functools
import time
import uuid
from collections.abc import Sequence

from aiohttp import web

from palm_mtf.errors import shorten
from palm_mtf.generation.serving.batcher import Batcher, FullError
from palm_mtf.generation.serving.completion_request import CompletionRequest
from palm_mtf.generation.serving.messages import (
  RefusalError,
  make_json_response,
  read_json,
)
from palm_mtf.generation.serving.served_model import Choice, ServedModel
from palm_mtf.json_text import json_text

# request[CLIENT] is the client's name, as `Access.find_client` returns it.
CLIENT = web.RequestKey("client", str)
# If a request's prompts together have more characters or ids than this number,
# another thread encodes the prompts, so that other requests need not wait.
_LONG = 10_000


class Completions:
  """Answers requests for completions with one batcher."""

  def __init__(self, model: ServedModel, batcher: Batcher):
    self._model, self._batcher = model, batcher

  async def answer(self, request: web.Request) -> web.StreamResponse:
    """Answers one request.

    Raises:
      RefusalError: if the request is wrong or cannot be served now.
    """
    body = await read_json(request, self._model.most_secs)
    if isinstance(body, dict) and body.get("model") is not None:
      check_name(self._model, body["model"])
    asked = self._model.read(body)
    changed = asyncio.Event()
    loop = asyncio.get_running_loop()
    begin = functools.partial(
      self._model.make_choices,
      asked,
      request[CLIENT],
      lambda: loop.call_soon_threadsafe(changed.set),
    )
    is_long = sum(map(len, asked.prompts)) > _LONG
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
      return await self._answer_whole(choices, changed)
    finally:
      # If the client has disconnected, this frees the slots. Rows that have
      # ended do not change.
      self._batcher.cancel(rows)

  async def _answer_whole(
    self, choices: Sequence[Choice], changed: asyncio.Event
  ) -> web.Response:
    unfinished = list(choices)
    while unfinished:
      await changed.wait()
      changed.clear()
      unfinished = [x for x in unfinished if not self._is_over(x)]
    found = [choice.read() for choice in choices]
    answer = {
      **self._make_head(),
      "choices": found,
      "usage": _count_tokens(choices),
    }
    return make_json_response(answer)

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
    head = self._make_head()
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

  def _make_head(self) -> dict:
    return {
      "id": f"cmpl-{uuid.uuid4().hex}",
      "object": "text_completion",
      "created": int(time.time()),
      "model": self._model.name,
    }


def check_name(model: ServedModel, name: object) -> None:
  """Raises RefusalError unless the model has this name."""
  if name != model.name:
    raise RefusalError(
      404, f"there is no model {shorten(name)}: give {model.name!r}."
    )


def _check_choice(choice: Choice) -> None:
  row = choice.row
  if row.ended == "failed":
    raise RefusalError(503, "this server is stopping.")
  if row.ended == "time" and not row.chosen:
    raise RefusalError(
      503, "the time limit passed before the first token; try again later."
    )


def _count_tokens(choices: Sequence[Choice]) -> dict[str, int]:
  # A prompt with several completions is counted once.
  prompts = {id(x.row.prompt): x.num_prompt_tokens for x in choices}
  of_prompts = sum(prompts.values())
  of_texts = sum(choice.num_tokens for choice in choices)
  return {
    "prompt_tokens": of_prompts,
    "completion_tokens": of_texts,
    "total_tokens": of_prompts + of_texts,
  }
