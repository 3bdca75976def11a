# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The streams of turns of all clients, in the manager's event loop.

A stream costs no thread, so thousands of clients may have one. When a stream
ends, the scheduler ends the client's programs and frees the bytes of its
buffers. gRPC's keepalive ends the stream of a client that is silent.
"""

import asyncio
import dataclasses
import itertools
import math
from collections.abc import AsyncIterator
from typing import Any

import grpc

from palm_mtf import __version__
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.manager.client import PROTOCOL
from palm_mtf.runtime.manager.slices import check_name
from palm_mtf.runtime.manager.turns import Message, Turns, read_messages

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
