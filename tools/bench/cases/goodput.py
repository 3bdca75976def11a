# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Simulates the goodput of runs whose chips fail, up to millions of chips.

  python -m tools.bench goodput
  python -m tools.bench goodput --chips 6144 --learners 1,2 --mtbi_hours 50676

Goodput is the time in which chips do work that is kept, divided by the time of
all chips. "elastic" learners leave a slice out as soon as a chip of it fails,
and take the slice back when it is repaired; both take a pause of this learner.
"waiting" learners wait for a spare slice. "restarted" learners go back to their
last checkpoint, as palm_mtf does. One learner is an all-reduce over all chips.
"""

# Chips fail independently, at the same rate all the time. A failure during a
# pause does not make the pause longer: it is handled with the first. Learners
# do not wait for each other, and the syncer needs only one of them, so each
# learner is simulated by itself; "uptime" is the time in which at least one
# learner works.
#
# Given by the paper on Decoupled DiLoCo (2604.21428), as summaries of it quote
# it: 1 interruption per chip and year, chips that fail as a Poisson process,
# repairs at random times, learners of equal size, and the goodput in PUBLISHED.
# Not found, so assumed here: seconds of a pause and of a wait, chips of a slice
# and seconds of a repair. The report on Gemini 2.5 (2507.06261, section 2.3)
# names "tens of seconds of lost training time per interruption" and "around 97%
# throughput while the failed slice is recovering". The defaults are 2 pauses of
# 9 s, and slices and repairs that keep 97% of the chips at work: the goodput of
# one elastic learner is then that of the paper, and that of several learners is
# a prediction. The wait lies between what the paper's 27% and 18% imply.

import argparse
import heapq
import itertools
import statistics
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from palm_mtf.accounting.goodput import goodput
from tools.bench.command import Flag, choices, numbers

YEAR_HOURS = 8766
# {(kind, chips, learners): goodput}, from tables 1 and 11 of the paper.
PUBLISHED = {
  ("elastic", 1_200_000, 1): 0.58,
  ("elastic", 1_200_000, 2): 0.70,
  ("elastic", 1_200_000, 4): 0.82,
  ("elastic", 1_200_000, 8): 0.88,
  ("elastic", 1_200_000, 16): 0.93,
  ("elastic", 2_400_000, 1): 0.40,
  ("elastic", 2_400_000, 8): 0.80,
  ("elastic", 2_400_000, 16): 0.86,
  ("waiting", 1_200_000, 1): 0.27,
  ("waiting", 2_400_000, 1): 0.18,
}
BOUNDS = {"goodput": (0, 1), "uptime": (0, 1), "closed_form": (0, 1)}
HEAD = (
  f"{'learners':<19} {'chips':>9} {'interrupted':>12} {'goodput':>8} "
  f"{'seeds differ':>12} {'closed form':>11} {'published':>9} {'uptime':>7}"
)
FLAGS = {
  "--chips": Flag(
    "150000,1200000,2400000", "of all learners", numbers("6144,12288")
  ),
  "--learners": Flag(
    "1,2,4,8,16", "into which chips are divided", numbers("1,8")
  ),
  "--kinds": Flag(
    "elastic,waiting",
    "of learners",
    choices(["elastic", "waiting", "restarted"]),
  ),
  "--mtbi_hours": Flag(YEAR_HOURS, "mean time between a chip's interruptions"),
  "--pause_secs": Flag(9, "of an elastic learner, per loss or return"),
  "--slice_chips": Flag(1024, "chips that are left out together"),
  "--repair_secs": Flag(900, "mean time until a slice is back"),
  "--wait_secs": Flag(65, "of a waiting learner, per loss"),
  "--restart_secs": Flag(600, "of a restarted learner, per failure"),
  "--checkpoint_secs": Flag(600, "of work between two checkpoints"),
  "--hours": Flag(48, "simulated"),
  "--seeds": Flag(3, "number of simulations"),
}


class Rates(NamedTuple):
  """What the simulation of a learner needs, in seconds; see FLAGS."""

  mtbi: float
  pause: float
  slice_chips: int
  repair: float
  wait: float
  restart: float
  checkpoint: float


class Learner(NamedTuple):
  """The simulated past of a learner."""

  kept: float  # seconds of work of all chips of the learner that are kept
  idle: list[tuple[float, float]]  # when it did not work, in order


def simulate_elastic(
  rates: Rates, chips: int, end: float, rng: np.random.Generator
) -> Learner:
  """Simulates an elastic learner from 0 to `end` seconds."""
  slices = max(1, chips // rates.slice_chips)
  down: set[int] = set()  # slices that are being repaired
  returns: list[tuple[float, int]] = []  # a heap of (time, slice)
  now = work = free = 0.0  # the learner works again at `free`
  failure, idle = rng.exponential(rates.mtbi / chips), []
  while now < end:
    then = min(failure, returns[0][0] if returns else end, end)
    work += max(0.0, then - max(now, free)) * (slices - len(down)) / slices
    now = then
    if now >= end:
      break
    if returns and returns[0][0] == now:
      down.remove(heapq.heappop(returns)[1])
    else:
      failure = now + rng.exponential(rates.mtbi / chips)
      failed = int(rng.integers(slices))
      if failed in down:  # chips that do not work cannot interrupt anything
        continue
      down.add(failed)
      back = now + rng.exponential(rates.repair)
      heapq.heappush(returns, (back, failed))
    if now >= free:
      free = now + rates.pause
      idle.append((now, min(free, end)))
  return Learner(work, idle)


def simulate_waiting(
  rates: Rates, chips: int, end: float, rng: np.random.Generator
) -> Learner:
  """Simulates a learner that waits for a spare slice, from 0 to `end`."""
  at_once = rates._replace(pause=rates.wait, repair=0.0)
  return simulate_elastic(at_once, chips, end, rng)


def simulate_restarted(
  rates: Rates, chips: int, end: float, rng: np.random.Generator
) -> Learner:
  """Simulates a learner that restarts from checkpoints, from 0 to `end`."""
  now = kept = 0.0
  idle: list[tuple[float, float]] = []
  while now < end:
    failure = min(now + rng.exponential(rates.mtbi / chips), end)
    kept += (failure - now) // rates.checkpoint * rates.checkpoint
    now = failure
    # A failure during a restart begins the restart again.
    while (secs := rng.exponential(rates.mtbi / chips)) < rates.restart:
      now += secs
    now += rates.restart
    idle.append((failure, min(now, end)))
  return Learner(min(kept, end), idle)


_SIMULATIONS = {
  "elastic": simulate_elastic,
  "waiting": simulate_waiting,
  "restarted": simulate_restarted,
}


def closed_form(rates: Rates, kind: str, chips: int) -> float:
  """Returns the expected goodput of a learner of `chips` chips."""
  mtbf = rates.mtbi / chips
  if kind == "restarted":
    return goodput(mtbf, rates.checkpoint, rates.restart)
  if kind == "waiting":
    return 1 / (1 + rates.wait / mtbf)
  # Each slice works for mtbi / slice_chips, then is repaired. A slice that
  # fails makes two pauses, at its loss and at its return. The times between
  # events of many slices are exponential, so after a pause the learner works
  # for mtbf / (2 x share of slices at work) on average.
  up = rates.mtbi / (rates.mtbi + rates.slice_chips * rates.repair)
  return up / (1 + 2 * up * rates.pause / mtbf)


def _overlap(times: list[list[tuple[float, float]]]) -> float:
  """Returns the seconds in which all learners are idle at once."""
  changes = sorted(
    change
    for start, stop in itertools.chain(*times)
    for change in ((start, 1), (stop, -1))
  )
  total, idle, last = 0.0, 0, 0.0
  for time, change in changes:
    total += (time - last) * (idle == len(times))
    idle, last = idle + change, time
  return total


def measure(chosen: argparse.Namespace) -> Iterator[dict]:
  """Yields a record per kind, number of chips and number of learners."""
  rates = Rates(
    3600.0 * chosen.mtbi_hours,
    chosen.pause_secs,
    chosen.slice_chips,
    chosen.repair_secs,
    chosen.wait_secs,
    chosen.restart_secs,
    chosen.checkpoint_secs,
  )
  end = 3600.0 * chosen.hours
  for kind, chips, learners in itertools.product(
    chosen.kinds, chosen.chips, chosen.learners
  ):
    own = chips // learners
    found, uptimes = [], []
    for seed in range(chosen.seeds):
      rng = np.random.default_rng(seed)
      runs = [_SIMULATIONS[kind](rates, own, end, rng) for _ in range(learners)]
      found.append(sum(x.kept for x in runs) / learners / end)
      uptimes.append(1 - _overlap([x.idle for x in runs]) / end)
    yield {
      "kind": kind,
      "chips": chips,
      "learners": learners,
      "interruption_secs": rates.mtbi / chips,
      "goodput": statistics.mean(found),
      "spread": max(found) - min(found),
      "closed_form": closed_form(rates, kind, own),
      "published": PUBLISHED.get((kind, chips, learners)),
      "uptime": min(uptimes),
    }


def row(record: dict) -> str:
  """Returns a line of the table."""
  published = record["published"]
  return (
    f"{record['learners']:>3} {record['kind']:<15} {record['chips']:>9,} "
    f"{record['interruption_secs']:>10,.1f} s {record['goodput']:>8.1%} "
    f"{record['spread']:>12.1%} {record['closed_form']:>11.1%} "
    f"{'' if published is None else format(published, '.0%'):>9} "
    f"{record['uptime']:>7.2%}"
  )
