# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Gangs start in one order, in fair shares, within budgets; none deadlocks."""

import collections
import random
import weakref
from collections.abc import Mapping, Sequence

import pytest

from palm_mtf.runtime.scheduler import (
  MAX_IN_FLIGHT,
  MAX_OVERTAKES,
  POLICIES,
  GangScheduler,
  Ticket,
)
from tests.refusals import message_of
from tests.runtime.islands import PODS, Client, Island, on, scheduler_of


def _assert_shares(used: Mapping[str, float], weights: Sequence[float]) -> None:
  total = sum(used.values())
  for got, weight in zip(used.values(), weights, strict=True):
    assert got / total == pytest.approx(weight / sum(weights), rel=0.05)


# The order.


def _may_start(program: Ticket, live: list[Ticket], max_in_flight: int) -> bool:
  """Whether a waiting program may start, by the definition of the order."""
  return all(
    sum(x.state == "running" and device in x.num_bytes for x in live)
    < max_in_flight
    and not any(
      x.state == "waiting" and x.order < program.order and device in x.num_bytes
      for x in live
    )
    for device in program.num_bytes
  )


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("max_in_flight", range(1, 5))
def test_of_10_000_random_gangs_exactly_those_start_whose_turn_it_is(
  policy, max_in_flight
):
  for seed in range(20):
    rng = random.Random(seed)
    _run_gangs_in_turn(rng, policy, max_in_flight)


def _run_gangs_in_turn(rng, policy, max_in_flight):
  scheduler = scheduler_of(policy, range(6), max_in_flight=max_in_flight)
  live: list[Ticket] = []

  def start() -> None:
    started = scheduler.start()
    assert sorted(started, key=lambda x: x.order) == started
    for each in started:  # each program in its turn
      each.state = "waiting"
    for each in started:
      assert _may_start(each, live, max_in_flight)
      each.state = "running"
    for each in live:
      if each.state == "waiting":
        assert not _may_start(each, live, max_in_flight)

  def end(number: int) -> None:
    running = [x for x in live if x.state == "running"]
    scheduler.finish(running[number % len(running)])
    live[:] = [x for x in live if x.state != "ended"]

  for _ in range(42):
    tenant = rng.randrange(4)
    devices = rng.sample(range(6), rng.randint(1, 6))
    given = "abcd"[tenant], on(*devices)
    live.append(scheduler.submit(*given, weight=1 + tenant))
    start()
    for _ in range(min(rng.randrange(3), len(live))):
      end(rng.randrange(100))
      start()
  while live:  # whatever waits, something runs
    end(0)
    start()


@pytest.mark.parametrize(
  ("policy", "order"), [("fifo", "abcd"), ("priority", "dbca")]
)
def test_submissions_run_in_their_order_or_with_large_priorities_first(
  policy, order
):
  scheduler = scheduler_of(policy, max_in_flight=1)
  for tenant, weight in zip("abcd", (1, 2, 2, 3), strict=True):
    scheduler.submit(tenant, on("pod0"), weight=weight)
  assert [x.tenant for x in _drain(scheduler)] == [*order]


def _drain(scheduler: GangScheduler) -> list[Ticket]:
  """Returns the programs that wait in the order in which they run."""
  ran = []
  while started := scheduler.start():
    ran += started
    for ticket in started:
      scheduler.finish(ticket)
  return ran


# Deadlocks.


def _run_in_queues(rng: random.Random, *, is_in_order: bool) -> bool:
  """Returns whether random gangs, four in flight on each device, all run."""
  scheduler = scheduler_of(rng.choice(POLICIES), range(4))
  queues = [[] for _ in range(4)]
  for _ in range(20):
    devices = rng.sample(range(4), rng.randint(1, 4))
    scheduler.submit(rng.choice("ab"), on(*devices), weight=rng.choice([1, 2]))
  num_ended = 0
  while True:
    started = scheduler.start()
    for number, queue in enumerate(queues):
      reached = [x for x in started if number in x.num_bytes]
      # If clients enqueue, messages to each device arrive in their own order.
      queue += reached if is_in_order else rng.sample(reached, len(reached))
    first = {queue[0] for queue in queues if queue}
    ready = [x for x in first if all(queues[y][0] is x for y in x.num_bytes)]
    if not ready:
      return num_ended == 20
    ticket = min(ready, key=lambda x: x.order)
    for device in ticket.num_bytes:
      del queues[device][0]
    scheduler.finish(ticket)
    num_ended += 1


def test_10_000_programs_enqueued_in_the_order_of_starts_all_run():
  rng = random.Random(0)
  assert all(_run_in_queues(rng, is_in_order=True) for _ in range(500))
  assert not all(_run_in_queues(rng, is_in_order=False) for _ in range(50))


def _run_after_each_other(rng: random.Random, *, is_told: bool) -> bool:
  """Returns whether programs that read results of earlier ones all run."""
  scheduler = scheduler_of("shares", range(4), max_in_flight=2)
  reads: dict[Ticket, list[Ticket]] = {}
  live: list[Ticket] = []
  num_left = 40
  while live or num_left:
    while num_left and rng.random() < 0.7:
      tenant, gang = rng.choice("ab"), rng.sample(range(4), rng.randint(1, 3))
      own = [x for x in reads if x.tenant == tenant]
      after = rng.sample(own, min(len(own), rng.randint(0, 2)))
      secs, told = rng.choice([1.0, 9.0]), after if is_told else ()
      live.append(scheduler.submit(tenant, on(*gang), secs, after=told))
      reads[live[-1]] = after
      num_left -= 1
    scheduler.start()
    ready = [x for x in live if x.state == "running"]
    ready = [x for x in ready if all(y.state == "ended" for y in reads[x])]
    if ready:
      live.remove(ended := rng.choice(ready))
      scheduler.finish(ended, rng.choice([1.0, 9.0]))
    elif live and not num_left:
      return False
  return True


def test_programs_that_hold_places_wait_only_for_programs_that_run():
  """A program that waits for another's result keeps its place meanwhile."""
  run = _run_after_each_other
  assert all(run(random.Random(x), is_told=True) for x in range(100))
  assert not all(run(random.Random(x), is_told=False) for x in range(300))


def test_a_chain_of_programs_keeps_none_that_has_ended():
  scheduler, last, first = scheduler_of(), None, None
  for _ in range(3):
    last = scheduler.submit("a", on("pod0"), after=[last] if last else ())
    first = first or weakref.ref(last)
    scheduler.start()
    scheduler.finish(last)
  assert first() is None


# Shares of device time.


@pytest.mark.parametrize("weights", [(1, 1, 1, 1), (1, 2, 4, 8)])
@pytest.mark.parametrize(
  ("millisecs", "estimate"),
  [((3, 3, 3, 3), None), ((1, 5, 2, 3), None), ((1, 5, 2, 3), 0.003)],
  ids=["equal_costs", "costs", "measured_costs"],
)
def test_shares_of_five_seconds_are_the_weights(weights, millisecs, estimate):
  clients = [
    Client(name, secs / 1000, weight, estimate)
    for name, secs, weight in zip("abcd", millisecs, weights, strict=True)
  ]
  _assert_shares(Island("shares", clients).run(5.0), weights)


def test_programs_start_in_the_order_of_their_start_tags():
  """The tags are worked out by hand, by Goyal et al. (1996), equation 4."""
  scheduler = scheduler_of("shares", max_in_flight=1)
  costs = [("a", 4, 1), ("a", 4, 1), ("b", 4, 2), ("b", 4, 2), ("b", 4, 2)]
  tickets = [scheduler.submit(x, on("pod0"), *rest) for x, *rest in costs]
  assert [x.order[0] for x in tickets] == [0, 4, 0, 2, 4]
  assert [tickets.index(x) for x in _drain(scheduler)] == [0, 2, 3, 1, 4]


def test_a_wrong_estimate_delays_no_program_that_waits():
  """Start tags follow Goyal et al. (1996), equation 4, with measured costs."""
  scheduler = scheduler_of("shares", max_in_flight=1)
  slow, second, third = (
    scheduler.submit("a", on("pod0"), secs) for secs in (100.0, 4.0, 4.0)
  )
  other = [scheduler.submit("b", on("pod0"), 4.0) for _ in range(2)]
  assert [x.order[0] for x in (second, third)] == [100.0, 104.0]
  assert scheduler.start() == [slow]
  scheduler.finish(slow, 2.0)
  assert [x.order[0] for x in (second, third)] == [2.0, 6.0]
  assert _drain(scheduler) == [other[0], second, other[1], third]


def test_a_tenant_that_returns_gets_its_share_but_no_credit():
  clients = [Client(x) for x in "abcd"]
  island = Island("shares", clients)
  island.run(1.0)
  clients[0].is_idle = True
  idle = island.run(2.0)
  assert idle["a"] < (MAX_IN_FLIGHT + 2) * 0.003  # what it had submitted
  clients[0].is_idle = False
  _assert_shares(island.run(1.0), [1, 1, 1, 1])


def test_tenants_of_a_slice_share_it_whatever_other_slices_do():
  clients = [Client("a", devices=["pod0"]), Client("b", devices=["pod1"])]
  clients.append(Client("c", weight=8.0, devices=["pod1"]))
  used = Island("shares", clients).run(5.0)
  assert used["a"] == pytest.approx(5.0, abs=0.1)
  _assert_shares({x: used[x] for x in "bc"}, [1, 8])


def test_a_gang_over_slices_of_different_virtual_times_gets_its_share():
  """The virtual time of pod0 is eight times that of pod1 when it begins."""
  gang = Client("gang", is_idle=True)
  clients = [Client("a", devices=["pod0"]), gang]
  clients.append(Client("b", weight=8.0, devices=["pod1"]))
  island = Island("shares", clients)
  island.run(5.0)
  gang.is_idle = False
  assert island.run(1.0)["gang"] > 0.95 / 9


# Budgets.


def test_a_large_program_is_overtaken_a_bounded_number_of_times():
  scheduler = GangScheduler("fifo", {"pod0": 100})
  small = [scheduler.submit("a", on("pod0", num_bytes=30)) for _ in range(2)]
  running = collections.deque(scheduler.start())
  assert [*running] == small
  large = scheduler.submit("b", on("pod0", num_bytes=90))
  for _ in range(3 * MAX_OVERTAKES):
    scheduler.submit("a", on("pod0", num_bytes=30))
    running += scheduler.start()
    if large.state == "running":
      break
    scheduler.finish(running.popleft())
  assert large.state == "running"
  assert MAX_OVERTAKES <= large.num_overtakes < MAX_OVERTAKES + MAX_IN_FLIGHT


def test_nobody_waits_for_a_program_that_waits_for_buffers():
  """Otherwise the buffers' client could wait for that program, and deadlock."""
  scheduler = GangScheduler("fifo", {"pod0": 100})
  scheduler.submit("a", on("pod0", num_bytes=50))
  (producer,) = scheduler.start()
  scheduler.finish(producer, kept={"pod0": 50})
  large = scheduler.submit("b", on("pod0", num_bytes=80))
  for _ in range(3 * MAX_OVERTAKES):
    consumer = scheduler.submit("a", on("pod0", num_bytes=20))
    assert scheduler.start() == [consumer]
    scheduler.finish(consumer)
  scheduler.free("a", {"pod0": 50})
  assert scheduler.start() == [large]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(2))
def test_whatever_fits_a_budget_runs_and_budgets_are_never_exceeded(
  policy, seed
):
  rng, devices = random.Random(seed), range(4)
  scheduler = GangScheduler(policy, dict.fromkeys(devices, 100))
  waiting: list[Ticket] = []
  running: list[Ticket] = []
  buffers: list[tuple[str, dict]] = []
  num_left = 400
  while num_left or waiting or running:
    if num_left and rng.random() < 0.6:
      gang = rng.sample(devices, rng.randint(1, 4))
      sizes = {x: rng.choice([0, 10, 30, 100]) for x in gang}
      waiting.append(scheduler.submit(rng.choice("abc"), sizes))
      num_left -= 1
    elif running:
      ticket = running.pop(rng.randrange(len(running)))
      kept = {x: rng.choice([0, n]) for x, n in ticket.num_bytes.items()}
      scheduler.finish(ticket, kept=kept)
      buffers.append((ticket.tenant, kept))
    else:
      assert buffers or not waiting, "nothing runs, and no buffer is kept"
    if buffers and (not running or rng.random() < 0.3):
      scheduler.free(*buffers.pop(rng.randrange(len(buffers))))
    running += scheduler.start()
    waiting = [x for x in waiting if x.state == "waiting"]
    for device in devices:
      every = [x.num_bytes for x in running] + [kept for _, kept in buffers]
      assert sum(x.get(device, 0) for x in every) <= 100
      assert sum(device in x.num_bytes for x in running) <= MAX_IN_FLIGHT


def test_a_wait_for_buffers_that_nobody_frees_is_explained():
  scheduler = GangScheduler("fifo", {"pod0": 100})
  scheduler.keep("a", {"pod0": 60})
  large = scheduler.submit("a", on("pod0", num_bytes=50))
  small = scheduler.submit("b", on("pod0", num_bytes=10))
  assert scheduler.start() == [small]
  assert not scheduler.explain_wait(large)  # bytes may be freed meanwhile
  scheduler.free("a", {"pod0": 5})
  assert not scheduler.explain_wait(large)
  assert scheduler.explain_wait(large) == (
    "50 bytes on device 'pod0': buffers keep 55 of its budget of 100, and none "
    "was freed for long; free some."
  )
  scheduler.finish(small)
  scheduler.free("a", {"pod0": 5})
  assert scheduler.start() == [large]
  assert not scheduler.explain_wait(large)


# Clients that leave.


def test_programs_and_bytes_of_a_removed_tenant_are_gone():
  scheduler = GangScheduler("shares", {"pod0": 100}, max_in_flight=2)
  first, second, third = (
    scheduler.submit("dead", on("pod0", num_bytes=40), 10.0) for _ in range(3)
  )
  assert scheduler.start() == [first, second]
  scheduler.finish(first, kept={"pod0": 40})
  others = [scheduler.submit("b", on("pod0", num_bytes=50)) for _ in range(2)]
  assert not scheduler.start()
  scheduler.remove("dead")
  assert scheduler.start() == others
  assert {x.state for x in (first, second, third)} == {"ended"}
  scheduler.finish(second)  # a message that was on its way
  assert not scheduler.start()
  # A client that takes the name later does not pay for these programs.
  namesake = scheduler.submit("dead", on("pod0"))
  assert namesake.order[0] == others[1].order[0]


def test_a_withdrawn_program_does_not_run_and_costs_nothing():
  scheduler = scheduler_of("shares", max_in_flight=1)
  ticket = scheduler.submit("a", on(*PODS), secs=100.0)
  scheduler.finish(ticket)
  first = scheduler.submit("a", on(*PODS))
  scheduler.submit("b", on(*PODS))
  assert scheduler.start() == [first]


@pytest.mark.parametrize(
  ("call", "message"),
  [
    (
      lambda x: x.submit("a", {"pod0": 2_000}),
      "2,000 bytes on device 'pod0': its budget is 1,000: use more devices, or "
      "raise the budget.",
    ),
    (
      lambda x: x.submit("a", {"pod7": 1}),
      "devices ['pod7']: give at least one of ['pod0'].",
    ),
    (lambda x: x.submit("a", {}), "devices []: give at least one of ['pod0']."),
    (
      lambda x: x.submit("a", {"pod0": 1}, secs=0),
      "secs = 0: give a number from 1e-09 to 1000000000.0.",
    ),
    (
      lambda x: x.finish(x.submit("a", {"pod0": 1}), kept={"pod0": 2}),
      "2 bytes on device 'pod0': the program reserved 1: reserve the bytes of "
      "its results, too.",
    ),
    (
      lambda x: x.finish(x.submit("a", {"pod0": 1}), secs=float("nan")),
      "secs = nan: give a number from 0.0 to 1000000000.0.",
    ),
    (
      lambda x: x.free("a", {"pod0": 1}),
      "1 bytes on device 'pod0': the client keeps 0: free each buffer once.",
    ),
    (
      lambda x: GangScheduler("fair", {}),
      "policy = 'fair': choose one of 'fifo', 'priority', 'shares'.",
    ),
  ],
)
def test_what_cannot_work_is_refused_in_one_line(call, message):
  assert message_of(call, GangScheduler("fifo", {"pod0": 1_000})) == message
