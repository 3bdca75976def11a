# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns: the manager tells each client when a program may use its devices.

A client opens a stream and submits programs. The manager answers when each of
them may start; the client says when it has ended. Messages are JSON objects, in
lists of those that are sent together:

  client   {"keep": {device: bytes}} of the buffers that the client has already
           {"submit": number, "num_bytes": {device: bytes}, "secs": estimate}
           {"check": number}, which is refused if it waits only for buffers
           {"finish": number, "secs": measured, "kept": {device: bytes}}
           {"free": {device: bytes}}
  manager  {"start": number} or {"refuse": number, "why": text}

A client without a manager has the same scheduler in its own process.

One scheduler serves the devices of all islands, because the programs of a run
with pods on several islands need one order across all of them.
"""

import contextlib
import json
import queue
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import grpc

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.scheduler import GangScheduler, Ticket

Message = Mapping[str, Any]
Answer = Callable[[Message], None]


class Turns:
  """Gives turns to the programs of all clients, in one order."""

  def __init__(
    self,
    scheduler: GangScheduler,
    list_devices: Callable[[], Mapping[str, int]],
  ):
    """Takes a function that returns the bytes of each device, by its name."""
    self._scheduler, self._list_devices = scheduler, list_devices
    self._lock = threading.Lock()
    # The number that the client gave to each program, and who gets the answer.
    self._tickets: dict[Ticket, tuple[int, Answer]] = {}

  def serve(
    self, tenant: str, weight: float, requests: Iterable[bytes]
  ) -> Iterator[bytes]:
    """Answers a client's requests until the client ends its stream.

    Args:
      tenant: name of the client, unique.
      weight: the client's share or priority, as the scheduler's policy says.
      requests: the client's messages.
    """
    with self._lock:
      self._scheduler.budgets.update(self._list_devices())
    answers: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
    take = self.add_client(tenant, weight, answers.put)

    def read() -> None:
      # gRPC raises an error if the client is gone. A client that frees what it
      # does not keep loses its stream.
      with contextlib.suppress(grpc.RpcError, UserError):
        for messages in requests:
          take(json.loads(messages))
      answers.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
      yield from join_messages(answers)
    finally:
      with self._lock:
        self._scheduler.remove(tenant)
        self._start()

  def add_client(
    self, tenant: str, weight: float, answer: Answer
  ) -> Callable[[Iterable[Message]], None]:
    """Returns a function that takes messages of a client (see `serve`)."""
    numbers: dict[int, Ticket] = {}

    def take(message: Message) -> None:
      match message:
        case {"submit": number, "num_bytes": num_bytes, "secs": secs}:
          try:
            ticket = self._scheduler.submit(tenant, num_bytes, secs, weight)
          except UserError as error:
            answer({"refuse": number, "why": str(error)})
            return
          numbers[number] = ticket
          self._tickets[ticket] = number, answer
        case {"check": number}:
          ticket = numbers.get(number)
          if ticket and (why := self._scheduler.explain_wait(ticket)):
            del numbers[number], self._tickets[ticket]
            self._scheduler.finish(ticket)
            answer({"refuse": number, "why": why})
        case {"finish": number, "secs": secs, "kept": kept}:
          if ticket := numbers.pop(number, None):
            self._tickets.pop(ticket, None)
            self._scheduler.finish(ticket, secs, kept)
          else:  # a program that began before the manager was restarted
            self._scheduler.keep(tenant, kept)
        case {"keep": num_bytes}:
          self._scheduler.keep(tenant, num_bytes)
        case {"free": num_bytes}:
          self._scheduler.free(tenant, num_bytes)

    def take_all(messages: Iterable[Message]) -> None:
      with self._lock:
        for message in messages:
          take(message)
        self._start()

    return take_all

  def _start(self) -> None:
    for ticket in self._scheduler.start():
      if ticket in self._tickets:
        number, answer = self._tickets[ticket]
        answer({"start": number})


def join_messages(
  messages: queue.SimpleQueue[Message | None],
) -> Iterator[bytes]:
  """Yields the messages of a queue, those that wait in one text, until None."""
  # Each text costs time in several threads of the sender and the receiver.
  group: list[Message | None] = [{}]
  while group[-1] is not None:
    group = [messages.get()]
    with contextlib.suppress(queue.Empty):
      while group[-1] is not None:
        group.append(messages.get_nowait())
    yield json_text([x for x in group if x is not None]).encode()
