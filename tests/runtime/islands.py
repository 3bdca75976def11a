# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A simulated island: a clock, and devices that run one program at a time.

On each device, programs run in the order in which they reach it.
"""

import collections
import dataclasses
import heapq
import itertools
from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Any

from palm_mtf.runtime.scheduler import MAX_IN_FLIGHT, GangScheduler, Ticket

PODS = ("pod0", "pod1")
UNLIMITED = 10**18


def scheduler_of(
  policy: str = "fifo", devices: Iterable[Hashable] = PODS, **more: Any
) -> GangScheduler:
  """Returns a scheduler of devices with enough memory."""
  return GangScheduler(policy, dict.fromkeys(devices, UNLIMITED), **more)


def on(*devices: str, num_bytes: int = 0) -> dict[str, int]:
  """Returns the bytes that a program needs on each device."""
  return dict.fromkeys(devices, num_bytes)


@dataclasses.dataclass
class Client:
  """A tenant that always has one program more than may be in flight."""

  name: str
  secs: float = 0.003
  weight: float = 1.0
  estimated_secs: float | None = None
  devices: Collection[str] = PODS
  is_idle: bool = False

  def submit(self, scheduler: GangScheduler) -> Ticket:
    secs = self.estimated_secs or self.secs
    return scheduler.submit(self.name, on(*self.devices), secs, self.weight)


class Island:
  """Simulates the programs of clients on devices that run one at a time.

  Attributes:
    now: seconds.
    used: seconds of device time that programs of each client took.
  """

  def __init__(self, policy: str, clients: Sequence[Client]):
    devices = {x for client in clients for x in client.devices}
    self.scheduler = scheduler_of(policy, sorted(devices))
    self.clients = {x.name: x for x in clients}
    self.now, self.used = 0.0, collections.Counter()
    self._queues = {x: collections.deque() for x in sorted(devices)}
    self._ends, self._numbers = [], itertools.count()
    self._num_live = collections.Counter()

  def run(self, secs: float) -> dict[str, float]:
    """Returns the seconds that each client used until `secs` have passed."""
    before, end = self.used.copy(), self.now + secs
    while self.now < end:
      self._submit()
      self._enqueue()
      self.now, _, ticket = heapq.heappop(self._ends)
      client = self.clients[ticket.tenant]
      for device in ticket.num_bytes:
        assert self._queues[device].popleft() is ticket
      self.scheduler.finish(ticket, client.secs)
      self._num_live[client.name] -= 1
      self.used[client.name] += client.secs
    return {x: self.used[x] - before[x] for x in self.clients}

  def _submit(self) -> None:
    for name, client in self.clients.items():
      while not client.is_idle and self._num_live[name] <= MAX_IN_FLIGHT:
        client.submit(self.scheduler)
        self._num_live[name] += 1

  def _enqueue(self) -> None:
    for ticket in self.scheduler.start():
      for device in ticket.num_bytes:
        self._queues[device].append(ticket)
    begun = {ticket for *_, ticket in self._ends}
    for ticket in {x[0] for x in self._queues.values() if x} - begun:
      if all(self._queues[x][0] is ticket for x in ticket.num_bytes):
        end = self.now + self.clients[ticket.tenant].secs
        heapq.heappush(self._ends, (end, next(self._numbers), ticket))
