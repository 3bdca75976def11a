# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Clients that stream completions, and the times at which events come."""

# One thread reads all streams, and reads events only after the last answer,
# because the clients share the cores with the server.

import dataclasses
import json
import re
import selectors
import socket
import time
from collections.abc import Iterable, Sequence

from palm_mtf.machine.wakeups import shorten_slice

_EVENT = re.compile(rb"data: (\{.*?\})\n\n", re.DOTALL)
_MOST_SECS = 600


@dataclasses.dataclass
class Stream:
  """One streamed completion.

  Attributes:
    prompt: token ids.
    max_tokens: number of tokens to ask for.
    start: seconds after the first request at which this one is sent.
    times: seconds from the request to each event that has text.
    num_tokens: number of tokens of the completion.
  """

  prompt: Sequence[int]
  max_tokens: int
  start: float = 0.0
  times: list[float] = dataclasses.field(default_factory=list)
  num_tokens: int = 0

  @property
  def gaps(self) -> list[float]:
    """Seconds between successive events."""
    return [y - x for x, y in zip(self.times[:-1], self.times[1:], strict=True)]

  def read(self, chunks: Iterable[tuple[float, bytes]]) -> None:
    """Reads an answer from (seconds after the request, bytes) pairs."""
    rest = b""
    for secs, content in chunks:
      rest += content
      end = 0
      for found in _EVENT.finditer(rest):
        end = found.end()
        event = json.loads(found[1])
        self.times += [secs for x in event["choices"] if x["text"]]
        if usage := event.get("usage"):
          self.num_tokens = usage["completion_tokens"]
      rest = rest[end:]
    if not self.num_tokens:
      raise SystemExit(f"the server has answered {rest[:300]!r}")


def _request(stream: Stream, fields: dict) -> bytes:
  body = json.dumps(
    {
      "prompt": list(stream.prompt),
      "max_tokens": stream.max_tokens,
      "temperature": 0.0,
      "stream": True,
      "stream_options": {"include_usage": True},
      **fields,
    }
  ).encode()
  head = (
    "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
    f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
  )
  return head.encode() + body


def run_streams(port: int, streams: Sequence[Stream], fields: dict) -> float:
  """Sends all requests, and reads all answers; returns the seconds it took.

  Args:
    port: of the server on this machine.
    streams: requests in the order of `start`; get their times.
    fields: what else each body has.
  """
  bodies = [_request(x, fields) for x in streams]
  chunks: list[list[tuple[float, bytes]]] = [[] for _ in streams]
  waiting = list(range(len(streams)))
  num_open = 0
  shorten_slice()  # an event's time must not include a wait for a core
  with selectors.DefaultSelector() as selector:
    begin = time.perf_counter()
    while waiting or num_open:
      now = time.perf_counter() - begin
      while waiting and streams[waiting[0]].start <= now:
        number = waiting.pop(0)
        connection = socket.create_connection(("127.0.0.1", port))
        sent = time.perf_counter()
        connection.sendall(bodies[number])
        selector.register(connection, selectors.EVENT_READ, (number, sent))
        num_open += 1
      pause = streams[waiting[0]].start - now if waiting else _MOST_SECS
      for key, _ in selector.select(pause):
        number, sent = key.data
        content = key.fileobj.recv(2**16)
        if content:
          chunks[number].append((time.perf_counter() - sent, content))
          continue
        selector.unregister(key.fileobj)
        key.fileobj.close()
        num_open -= 1
    secs = time.perf_counter() - begin
  for stream, own in zip(streams, chunks, strict=True):
    stream.read(own)
  return secs
