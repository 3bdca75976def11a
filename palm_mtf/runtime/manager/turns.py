# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns: the manager tells each client when a program may use its devices.

A client opens a stream and submits programs. The manager answers when each of
them may start; the client says when it has ended. Messages are JSON objects:

  client   {"submit": number, "num_bytes": {device: bytes}, "secs": estimate}
           {"finish": number, "secs": measured, "kept": {device: bytes}}
           {"free": {device: bytes}}
  manager  {"start": number} or {"refuse": number, "why": text}

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


class Turns:
  """Gives turns to the programs of all clients, in one order."""

  def __init__(
    self,
    scheduler: GangScheduler,
    list_devices: Callable[[], Mapping[str, int]],
  ):
    """Takes a scheduler.

    Args:
      scheduler: scheduler of all islands.
      list_devices: returns the bytes of each device, by the device's name.
    """
    self._scheduler, self._list_devices = scheduler, list_devices
    self._lock = threading.Lock()
    # The number that the client gave to each program, and the client's answers.
    self._tickets: dict[Ticket, tuple[int, queue.SimpleQueue]] = {}

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
    answers: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()

    def read() -> None:
      numbers: dict[int, Ticket] = {}
      # gRPC raises an error if the client is gone.
      with contextlib.suppress(grpc.RpcError):
        for request in requests:
          self._take(tenant, weight, json.loads(request), numbers, answers)
      answers.put(None)

    threading.Thread(target=read, daemon=True).start()
    try:
      while (answer := answers.get()) is not None:
        yield answer
    finally:
      with self._lock:
        self._scheduler.remove(tenant)
        self._start()

  def _take(
    self,
    tenant: str,
    weight: float,
    request: Mapping[str, Any],
    numbers: dict[int, Ticket],
    answers: queue.SimpleQueue,
  ) -> None:
    """Takes one message of a client."""
    with self._lock:
      match request:
        case {"submit": number, "num_bytes": num_bytes, "secs": secs}:
          try:
            ticket = self._scheduler.submit(tenant, num_bytes, secs, weight)
          except UserError as error:
            refusal = {"refuse": number, "why": str(error)}
            answers.put(json_text(refusal).encode())
            return
          numbers[number] = ticket
          self._tickets[ticket] = number, answers
        case {"finish": number, "secs": secs, "kept": kept}:
          ticket = numbers.pop(number)
          self._tickets.pop(ticket, None)
          self._scheduler.finish(ticket, secs, kept)
        case {"free": num_bytes}:
          self._scheduler.free(tenant, num_bytes)
      self._start()

  def _start(self) -> None:
    for ticket in self._scheduler.start():
      if ticket in self._tickets:
        number, answers = self._tickets[ticket]
        answers.put(json_text({"start": number}).encode())
