# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How much of the transfers between pods was hidden behind computation.

A pod is receiving while some transfer to it lasts, from when the sender has the
tensor to when the pod has it (records.py). It is computing while some device of
it runs an operation. While it receives and computes, the transfer is hidden;
while it receives and does not, it is exposed:

  receiving   ------######------####---
  computing   #########------##########
                    hhheee      hhhh      hidden, exposed

A transfer that is hidden is not free where the processor that computes also
sends and receives, as CPUs do.
"""

import itertools
from collections.abc import Container, Iterable
from typing import NamedTuple

from palm_mtf.trace.records import Trace

Intervals = list[tuple[float, float]]


class Received(NamedTuple):
  """What a pod, or one way to it, took of a step.

  Attributes:
    received_bytes: how much arrived.
    hidden_secs: in which it received and computed.
    exposed: when it received and did not compute, seconds after the step's
      beginning.
  """

  received_bytes: int
  hidden_secs: float
  exposed: Intervals

  @property
  def exposed_secs(self) -> float:
    """How long that was."""
    return total(self.exposed)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
  """Returns disjoint intervals in order, that cover what `intervals` do."""
  merged: Intervals = []
  for start, end in sorted(each for each in intervals if each[0] < each[1]):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    else:
      merged.append((start, end))
  return merged


def without(intervals: Intervals, others: Intervals) -> Intervals:
  """Returns what is in `intervals` and not in `others`, both disjoint."""
  left: Intervals = []
  first = 0
  for start, end in intervals:
    while first < len(others) and others[first][1] <= start:
      first += 1
    for other_start, other_end in itertools.islice(others, first, None):
      if other_start >= end:
        break
      if start < other_start:
        left.append((start, other_start))
      start = max(start, other_end)
    if start < end:
      left.append((start, end))
  return left


def total(intervals: Intervals) -> float:
  """Returns the length of disjoint intervals."""
  return sum(end - start for start, end in intervals)


def received(
  trace: Trace, target: int, sources: Container[int] | None = None
) -> Received:
  """Returns what pod `target` received, from `sources` or all other pods."""
  transfers = [
    x
    for x in trace.transfers
    if x.target == target and (sources is None or x.source in sources)
  ]
  receiving = union((x.ready, x.arrived) for x in transfers)
  computing = union(
    (x.start, x.end) for x in trace.operations if x.pod == target
  )
  exposed = without(receiving, computing)
  return Received(
    received_bytes=sum(x.num_bytes for x in transfers),
    hidden_secs=total(receiving) - total(exposed),
    exposed=exposed,
  )


def step_figures(trace: Trace) -> dict[str, float | int]:
  """Returns the numbers of a traced step, as metrics.jsonl has them.

    traced_step_secs        from the first record to the last
    traced_dcn_bytes        that all pods received
    traced_hidden_secs      a pod's hidden time, the mean of all pods
    traced_exposed_secs     a pod's exposed time, the mean of all pods
    traced_gbits_per_sec    what a pod received in these two, 10^9 bits a second

  There is no rate where nothing took time, as in one process. Where each token
  weighs the same and a step is one microbatch, its weight is a constant, and
  TensorFlow computes the sum before the first step: 4 bytes from each device,
  which accounting/communication.py counts, do not cross.
  """
  pods = [received(trace, pod) for pod in range(trace.num_pods)]
  num_bytes = sum(x.received_bytes for x in pods)
  hidden = sum(x.hidden_secs for x in pods)
  exposed = sum(x.exposed_secs for x in pods)
  figures = {
    "traced_step_secs": trace.end,
    "traced_dcn_bytes": num_bytes,
    "traced_hidden_secs": hidden / len(pods),
    "traced_exposed_secs": exposed / len(pods),
  }
  if hidden + exposed:
    figures["traced_gbits_per_sec"] = num_bytes * 8e-9 / (hidden + exposed)
  return figures
