# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The gang scheduler: decides which programs may start now.

Tenants are clients, which submit programs. A program is a gang: it starts on
all its devices at once. Programs that share devices start in the same order on
all of them. In opposite orders, devices that run one program at a time deadlock
(Barham et al. 2022, section 4.4).

The policy orders the programs that wait:
  fifo: by submission.
  priority: by the tenant's weight, the largest first; then by submission.
  shares: by start tag. A program's start tag is the finish tag of the tenant's
    previous program, but at least the virtual time, which is the largest start
    tag of a program that has started. Its finish tag is start tag + seconds /
    weight. So tenants that wait for the same devices get device time in
    proportion to their weights. This is start-time fair queueing (Goyal et al.
    1996) with several programs in flight (Jin et al. 2004).

A program waits while an earlier program waits for one of its devices. But it
overtakes an earlier program of another tenant that waits only for bytes or for
inputs. After MAX_OVERTAKES overtakes, no later program starts on the devices of
the overtaken program until that program fits, unless buffers hold the bytes
that it lacks. A tenant's programs do not overtake each other: results of later
programs could take the bytes that an earlier program needs before it can free
its inputs.

A program starts only after the programs whose results it reads. Otherwise it
could occupy a device on which those programs wait for room.
"""

import bisect
import dataclasses
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence

from palm_mtf import errors

POLICIES = ("fifo", "priority", "shares")
# Limit of programs sent to a device at a time. More programs hide the delay of
# sending; with fewer, device times are closer to the clients' weights.
MAX_IN_FLIGHT = 4
MAX_OVERTAKES = 16  # of one program; then later programs wait until it fits

Bytes = Mapping[Hashable, int]  # {device: number of bytes}
Counts = Counter[Hashable]  # {device: number of programs or of bytes}
Tags = dict[Hashable, float]  # {device: start or finish tag, seconds / weight}


@dataclasses.dataclass(eq=False)  # compared by identity, as a dict key
class Ticket:
  """A submitted program; the first fields are the arguments of `submit`."""

  tenant: str
  num_bytes: Bytes
  secs: float
  weight: float
  # Programs that must start before this one. () after its start: otherwise a
  # ticket would keep all earlier tickets in memory.
  after: Sequence["Ticket"]
  now: float  # virtual time at submission; lower bound of the start tag
  order: tuple[float, int]  # rank by the policy, then submission's number
  state: str = "waiting"  # then "running", then "ended"
  num_overtakes: int = 0  # later programs that have overtaken it
  num_freed: int = -1  # calls of `free`, by all clients, until its last check


class GangScheduler:
  """Orders the programs of all tenants.

  After every other method, call `start`, and enqueue the programs that it
  returns in their order. If clients enqueue their own programs, their messages
  may overtake each other; then devices that run one program at a time need
  max_in_flight = 1.
  """

  def __init__(
    self, policy: str, budgets: Bytes, max_in_flight: int = MAX_IN_FLIGHT
  ):
    errors.check_choice("policy", policy, POLICIES)
    errors.check_count("max_in_flight", max_in_flight)
    # {device: bytes for programs and buffers}; callers may add devices.
    self.budgets = dict(budgets)
    self._policy, self._max_in_flight = policy, max_in_flight
    self._num_tickets = 0
    self._waiting: list[Ticket] = []  # in the order of the policy
    self._running: set[Ticket] = set()
    self._full: set[Hashable] = set()  # devices that run max_in_flight programs
    self._num_running: Counts = Counter()
    self._used: Counts = Counter()  # bytes of running programs and buffers
    self._kept: Counts = Counter()  # bytes of buffers
    self._num_freed = 0  # calls of `free`, to see whether any bytes were freed
    self._virtual_times: Tags = defaultdict(float)  # largest start tag so far
    # By tenant and device: bytes of buffers; and for the policy "shares" the
    # finish tags of the programs that started last and were submitted last.
    self._kept_by: dict[str, Counts] = defaultdict(Counter)
    self._finish_tags: dict[str, Tags] = defaultdict(lambda: defaultdict(float))
    self._last_tags: dict[str, Tags] = defaultdict(lambda: defaultdict(float))

  def submit(
    self,
    tenant: str,
    num_bytes: Bytes,
    secs: float = 1.0,
    weight: float = 1.0,
    after: Sequence[Ticket] = (),
  ) -> Ticket:
    """Adds a program to the programs that wait.

    Args:
      num_bytes: bytes that the program needs, for each of its devices.
      secs: estimated seconds for which the program occupies its devices, such
        as the measured seconds of its last run.
      weight: the tenant's weight or priority, as the policy says.
      after: the tenant's programs that must start before this program.

    Raises UserError if a device is unknown, or its budget is too small.
    """
    errors.check_real("secs", secs, 1e-9, 1e9)
    errors.check_real("weight", weight, 1e-6, 1e6)
    if not num_bytes or not num_bytes.keys() <= self.budgets.keys():
      given, known = (errors.shorten([*x]) for x in (num_bytes, self.budgets))
      raise errors.UserError(f"devices {given}: give at least one of {known}.")
    rule = "its budget is {}: use more devices, or raise the budget"
    _check_bytes(num_bytes, self.budgets, rule)
    # Virtual times of devices advance at different speeds. Set those of the
    # gang's devices to their maximum; otherwise the gang would wait for long on
    # the device whose virtual time is smallest.
    now = max(self._virtual_times[x] for x in num_bytes)
    self._virtual_times.update(dict.fromkeys(num_bytes, now))
    self._num_tickets += 1
    order = (-weight if self._policy == "priority" else 0.0, self._num_tickets)
    ticket = Ticket(tenant, num_bytes, secs, weight, after, now, order)
    if self._policy == "shares":
      _set_tag(ticket, self._last_tags[tenant])
    bisect.insort(self._waiting, ticket, key=lambda x: x.order)
    return ticket

  def start(self) -> list[Ticket]:
    """Starts programs that may start; returns them in the policy's order."""
    started: list[Ticket] = []
    short: list[Ticket] = []  # programs that later programs may overtake
    # {tenant: devices of its programs in `short`, which it may not overtake}
    short_on: dict[str, set[Hashable]] = defaultdict(set)
    blocked = set(self._full)  # devices on which later programs wait
    for ticket in self._waiting:
      if len(blocked) == len(self.budgets):
        break
      if not blocked.isdisjoint(ticket.num_bytes) or self._must_fit(ticket):
        blocked.update(ticket.num_bytes)
      elif (
        self._lacks_bytes(ticket, self._used)
        or not short_on[ticket.tenant].isdisjoint(ticket.num_bytes)
        or any(x.state == "waiting" for x in ticket.after)
      ):
        short.append(ticket)
        short_on[ticket.tenant].update(ticket.num_bytes)
      else:
        self._run(ticket)
        started.append(ticket)
        blocked |= self._full & ticket.num_bytes.keys()
        for each in short:
          if not each.num_bytes.keys().isdisjoint(ticket.num_bytes):
            each.num_overtakes += 1
    self._waiting = [x for x in self._waiting if x.state == "waiting"]
    return started

  def finish(
    self, ticket: Ticket, secs: float | None = None, kept: Bytes | None = None
  ) -> None:
    """Ends a program, or withdraws it if it waits.

    If the program has ended, nothing happens: a client may repeat its message.
    `secs` is the measured device time; None for the estimated time. `kept` has
    the bytes of its results, by device, until the tenant frees them. Raises
    UserError if the program reserved fewer bytes.
    """
    if ticket.state == "ended":
      return
    rule = "the program reserved {}: reserve the bytes of its results, too"
    _check_bytes(kept or {}, ticket.num_bytes, rule)
    secs = ticket.secs if secs is None else secs
    errors.check_real("secs", secs, 0.0, 1e9)
    if ticket.state == "running":
      self._running.remove(ticket)
      self._num_running.subtract(ticket.num_bytes.keys())
      self._full -= ticket.num_bytes.keys()
      self._used.subtract(ticket.num_bytes)
      self.keep(ticket.tenant, kept or {})
      for device in ticket.num_bytes:
        excess = (secs - ticket.secs) / ticket.weight
        self._finish_tags[ticket.tenant][device] += excess
    else:
      self._waiting.remove(ticket)
    ticket.state, ticket.after = "ended", ()
    self._tag(ticket.tenant)

  def explain_wait(self, ticket: Ticket) -> str:
    """Returns why a program waits, if buffers hold bytes that it needs.

    Returns "" for other programs, and also if bytes were freed since the last
    call for this program.
    """
    before, ticket.num_freed = ticket.num_freed, self._num_freed
    if ticket.state == "waiting" and before == self._num_freed:
      for device, needed in ticket.num_bytes.items():
        budget, kept = self.budgets[device], self._kept[device]
        if needed > budget - kept:
          return (
            f"{needed:,} bytes on device {device!r}: buffers keep {kept:,} of "
            f"its budget of {budget:,}, and none was freed for long; free some."
          )
    return ""

  def free(self, tenant: str, num_bytes: Bytes) -> None:
    """Frees bytes of buffers, by device; UserError if the tenant has fewer."""
    rule = "the client keeps {}: free each buffer once"
    _check_bytes(num_bytes, self._kept_by[tenant], rule)
    self._num_freed += 1
    self.keep(tenant, {x: -given for x, given in num_bytes.items()})

  def remove(self, tenant: str) -> None:
    """Ends a tenant's programs, including running ones; frees its bytes."""
    for ticket in [*self._waiting, *self._running]:
      if ticket.tenant == tenant:
        self.finish(ticket)
    self.free(tenant, self._kept_by[tenant])
    del self._kept_by[tenant]
    self._finish_tags.pop(tenant, None)
    self._last_tags.pop(tenant, None)

  def _tag(self, tenant: str) -> None:
    """Updates a tenant's start tags, now that a program's time is measured."""
    if self._policy != "shares":
      return
    finish = self._finish_tags[tenant].copy()
    own = (x for x in self._waiting if x.tenant == tenant)
    for ticket in sorted(own, key=lambda x: x.order[1]):
      _set_tag(ticket, finish)
    self._last_tags[tenant] = finish
    self._waiting.sort(key=lambda x: x.order)

  def _lacks_bytes(self, ticket: Ticket, used: Counts) -> bool:
    # `used` may exceed a budget, because training runs may reserve bytes at any
    # time. A program that needs no bytes starts even then.
    needs = ticket.num_bytes.items()
    return any(n > max(0, self.budgets[x] - used[x]) for x, n in needs)

  def _must_fit(self, ticket: Ticket) -> bool:
    # Keep no device idle to wait for bytes that buffers hold: the client of
    # these buffers may have to run a later program before it can free them.
    return (
      ticket.num_overtakes >= MAX_OVERTAKES
      and self._lacks_bytes(ticket, self._used)
      and not self._lacks_bytes(ticket, self._kept)
    )

  def _run(self, ticket: Ticket) -> None:
    ticket.state, ticket.after = "running", ()
    self._running.add(ticket)
    self._used.update(ticket.num_bytes)
    self._num_running.update(ticket.num_bytes.keys())
    finish = dict.fromkeys(ticket.num_bytes, _finish_tag(ticket))
    self._finish_tags[ticket.tenant].update(finish)
    for device in ticket.num_bytes:
      if self._num_running[device] >= self._max_in_flight:
        self._full.add(device)
      self._virtual_times[device] = max(
        self._virtual_times[device], ticket.order[0]
      )

  def kept_by(self, tenant: str) -> dict[Hashable, int]:
    """Returns the bytes of a tenant's buffers, by device."""
    return {x: n for x, n in self._kept_by[tenant].items() if n}

  def keep(self, tenant: str, num_bytes: Bytes) -> None:
    """Adds the bytes of buffers, by device, that a tenant keeps."""
    for counter in (self._used, self._kept, self._kept_by[tenant]):
      counter.update(num_bytes)


def _set_tag(ticket: Ticket, finish: Tags) -> None:
  """Sets a program's start tag and, in `finish`, its finish tag per device."""
  tags = [finish[x] for x in ticket.num_bytes]
  tag = max(ticket.now, *tags, *(x.order[0] for x in ticket.after))
  ticket.order = tag, ticket.order[1]
  finish.update(dict.fromkeys(ticket.num_bytes, _finish_tag(ticket)))


def _finish_tag(ticket: Ticket) -> float:
  return ticket.order[0] + ticket.secs / ticket.weight


def _check_bytes(num_bytes: Bytes, limits: Bytes, rule: str) -> None:
  for device, given in num_bytes.items():
    limit = limits.get(device, 0)
    if not 0 <= given <= limit:
      reason = rule.format(f"{limit:,}")
      raise errors.UserError(f"{given:,} bytes on device {device!r}: {reason}.")
