# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Turns: the manager tells each client when a program may use its devices.

A client opens a stream and submits programs. The manager tells the client when
each program may start; the client reports when the program has ended. Each item
of the stream is a JSON list of messages, which are objects:

  client   {"keep": {device: bytes}}: bytes of buffers that it has already
           {"submit": number, "program": id, "num_bytes": {device: bytes},
            "after": numbers of programs that must start before}: asks to start;
            earlier runs with the same id give the estimated time
           {"check": number}: asks to refuse the program if buffers block it and
            no bytes were freed since the previous check
           {"run": number}: the program's inputs exist; its device time begins
           {"finish": number, "kept": {device: bytes}}: the program has ended;
            its results fill buffers of so many bytes
           {"free": {device: bytes}}: buffers of so many bytes are removed
  manager  [] first; then {"start": number} or {"refuse": number, "why": text}

A manager has one scheduler for all islands, because the programs of a run with
pods on several islands need one order across all of them. A client without a
manager has a scheduler in its own process.
"""

import contextlib
import dataclasses
import json
import queue
import statistics
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from typing import Any

from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.runtime.scheduler import GangScheduler, Ticket

Message = Mapping[str, Any]
Answer = Callable[[Message], None]

_FIRST_SECS = 0.01  # estimated device time of a program that has not run yet
# The estimate is the median of the last runs, at most this many, so that a slow
# run does not delay the next programs. When a program ends, its measured device
# time replaces the estimate.
_NUM_RUNS = 9
# Bounds for what a client makes the manager store, far above what a client of
# palm_mtf needs: programs that have not ended, programs whose times are known,
# and devices that the manager does not know.
_MAX_LIVE, _MAX_PROGRAMS, _MAX_DEVICES = 100_000, 10_000, 10_000


def read_messages(text: bytes) -> list[Message]:
  """Parses a JSON list of messages; UserError if `text` is no such list."""
  try:
    messages = json.loads(text)
    if isinstance(messages, list) and all(map(_is_message, messages)):
      return messages
  except (ValueError, RecursionError):
    pass
  raise UserError("these are no messages of palm_mtf.")


def _is_message(message: object) -> bool:
  match message:
    case {"submit": n, "program": program, "num_bytes": some, "after": after}:
      is_list = isinstance(after, list) and all(map(_is_count, after))
      return (
        is_list and _is_count(n) and _is_count(program) and _are_bytes(some)
      )
    case {"check": n} | {"run": n}:
      return _is_count(n)
    case {"finish": n, "kept": some}:
      return _is_count(n) and _are_bytes(some)
    case {"keep": some} | {"free": some}:
      return _are_bytes(some)
  return False


def _is_count(number: object) -> bool:
  return type(number) is int and 0 <= number < 2**63


def _are_bytes(some: object) -> bool:
  return isinstance(some, dict) and all(map(_is_count, some.values()))


@dataclasses.dataclass(frozen=True)
class _Client:
  weight: float
  answer: Answer
  # {number: (ticket, program id)} of the programs that have not ended.
  live: dict[int, tuple[Ticket, int]] = dataclasses.field(default_factory=dict)
  # {program id: device times of the last runs}. The first run is left out, and
  # counts as _FIRST_SECS for the client, because in that time the servers
  # prepare the program while their devices run other programs.
  runs: dict[int, deque[float]] = dataclasses.field(default_factory=dict)


class Turns:
  """Gives turns to the programs of all clients, in one order."""

  def __init__(
    self,
    scheduler: GangScheduler,
    list_devices: Callable[[], Mapping[str, int]],
  ):
    """`list_devices` returns {device: bytes that programs may use}."""
    self._scheduler, self._list_devices = scheduler, list_devices
    self._lock = threading.Lock()
    self._clients: dict[str, _Client] = {}  # by tenant
    # {program: (the client's number for it, function that answers the client)}
    self._tickets: dict[Ticket, tuple[int, Answer]] = {}
    self._device_time = DeviceTime()

  def add_client(self, tenant: str, weight: float, answer: Answer) -> None:
    """Adds a client, which has the unique name `tenant`.

    `weight` is a share of device time with the policy "shares", and a priority
    with "priority". `answer` sends the client a message.
    """
    with self._lock:
      self._scheduler.budgets.update(self._list_devices())
      self._clients[tenant] = _Client(weight, answer)

  def remove_client(self, tenant: str) -> None:
    """Ends the programs of a client, and frees its bytes."""
    with self._lock:
      del self._clients[tenant]
      self._scheduler.remove(tenant)
      for ticket in [x for x in self._tickets if x.state == "ended"]:
        self._end(ticket)
      self._start()

  def describe(self, tenant: str) -> dict[str, Any]:
    """Returns how many programs and bytes a client holds, as a JSON object."""
    with self._lock:
      states = [x.state for x, _ in self._clients[tenant].live.values()]
      return {
        "num_running": states.count("running"),
        "num_waiting": states.count("waiting"),
        # Leave out devices without a server: a client may name thousands.
        "kept_bytes": {
          device: num_bytes
          for device, num_bytes in self._scheduler.kept_by(tenant).items()
          if device in self._scheduler.budgets
        },
      }

  def take(self, tenant: str, messages: Iterable[Message]) -> None:
    """Handles messages; UserError if one does not fit the client's buffers."""
    with self._lock:
      for message in messages:
        self._take(tenant, self._clients[tenant], message)
      self._start()

  def _take(self, tenant: str, client: _Client, message: Message) -> None:
    live, runs = client.live, client.runs
    match message:
      case {"submit": _}:
        self._submit(tenant, client, message)
      case {"check": number} if number in live:
        ticket, _ = live[number]
        if why := self._scheduler.explain_wait(ticket):
          del live[number]
          self._end(ticket)
          self._scheduler.finish(ticket)
          client.answer({"refuse": number, "why": why})
      case {"run": number} if number in live:
        ticket, _ = live[number]
        if ticket.state == "running":
          self._device_time.begin(ticket)
      case {"finish": number, "kept": kept}:
        if number in live:
          ticket, program = live.pop(number)
          secs = self._end(ticket)
          if program in runs:
            runs[program].append(secs)
          else:
            runs[program], secs = deque(maxlen=_NUM_RUNS), _FIRST_SECS
            if len(runs) > _MAX_PROGRAMS:
              del runs[next(iter(runs))]
          self._scheduler.finish(ticket, secs, kept)
        else:  # a program of an earlier stream: count its results' bytes
          self._keep(tenant, kept)
      case {"keep": num_bytes}:
        self._keep(tenant, num_bytes)
      case {"free": num_bytes}:
        self._scheduler.free(tenant, num_bytes)

  def _keep(self, tenant: str, num_bytes: Mapping[str, int]) -> None:
    before = self._scheduler.kept_by(tenant).keys()
    if len((before | num_bytes.keys()) - self._scheduler.budgets.keys()) > (
      _MAX_DEVICES
    ):
      raise UserError(f"more than {_MAX_DEVICES:,} unknown devices.")
    self._scheduler.keep(tenant, num_bytes)

  def _submit(self, tenant: str, client: _Client, message: Message) -> None:
    number, program = message["submit"], message["program"]
    num_bytes, live = message["num_bytes"], client.live
    if number in live or len(live) >= _MAX_LIVE:
      raise UserError(
        f"program {number}: has not ended, or {_MAX_LIVE:,} others have not."
      )
    after = [live[x][0] for x in message["after"] if x in live]
    budgets = self._scheduler.budgets
    if not num_bytes.keys() <= budgets.keys():
      budgets.update(self._list_devices())
    if not num_bytes.keys() <= budgets.keys():
      # A manager that starts with a new file knows servers only after their
      # next heartbeats. Until then the program runs without a turn.
      client.answer({"start": number})
      return
    secs = statistics.median_low(client.runs.get(program) or [0.0])
    try:
      ticket = self._scheduler.submit(
        tenant, num_bytes, secs or _FIRST_SECS, client.weight, after
      )
    except UserError as error:
      client.answer({"refuse": number, "why": str(error)})
      return
    live[number] = ticket, program
    self._tickets[ticket] = number, client.answer

  def _end(self, ticket: Ticket) -> float:
    """Forgets a program; returns its device time in seconds (`DeviceTime`)."""
    self._tickets.pop(ticket, None)
    return self._device_time.end(ticket)

  def _start(self) -> None:
    for ticket in self._scheduler.start():
      if ticket in self._tickets:
        number, answer = self._tickets[ticket]
        answer({"start": number})


class DeviceTime:
  """Measures programs' device time, which the scheduler shares among clients.

  If n programs run on a device at the same time, each of them gets 1/n of that
  time. A program's device time is the largest of the times on its devices.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    # By device: number of running programs; device seconds of a program that
    # runs all the time; time at which these two were last updated.
    self._num_running: Counter[Hashable] = Counter()
    self._given: dict[Hashable, float] = defaultdict(float)
    self._until: dict[Hashable, float] = {}
    # {program: {device: `_given` when the program began}}, to subtract later.
    self._begun: dict[Ticket, dict[Hashable, float]] = {}

  def begin(self, ticket: Ticket) -> None:
    """Notes that a program runs on its devices."""
    self._advance(ticket, +1)
    self._begun[ticket] = {x: self._given[x] for x in ticket.num_bytes}

  def end(self, ticket: Ticket) -> float:
    """Notes that a program has ended, and returns its device time in seconds.

    The time of a program that has not begun is 0.
    """
    if ticket not in self._begun:
      return 0.0
    self._advance(ticket, -1)
    before = self._begun.pop(ticket)
    return max(self._given[x] - before[x] for x in before)

  def _advance(self, ticket: Ticket, change: int) -> None:
    now = self._clock()
    for device in ticket.num_bytes:
      if n := self._num_running[device]:
        self._given[device] += (now - self._until[device]) / n
      self._num_running[device] += change
      self._until[device] = now


def join_messages(
  messages: queue.SimpleQueue[Message | None],
) -> Iterator[bytes]:
  """Yields JSON lists of the messages that wait in a queue, until None."""
  # Each list costs time in several threads on both sides, so send few lists.
  group: list[Message | None] = [{}]
  while group[-1] is not None:
    group = [messages.get()]
    with contextlib.suppress(queue.Empty):
      while group[-1] is not None:
        group.append(messages.get_nowait())
    yield json_text([x for x in group if x is not None]).encode()
