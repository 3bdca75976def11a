# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Measures how far transfers between pods overlap with computation.

receiving   ------######------####---
computing   #########------##########
                  hhheee      hhhh      hidden, exposed
"""

import itertools
from collections.abc import Container, Iterable
from typing import NamedTuple

from palm_mtf.trace.records import Trace

Intervals = list[tuple[float, float]]  # [start, end) in seconds


class Received(NamedTuple):
  """What one pod received in a step, from all or from some other pods."""

  received_bytes: int
  hidden_secs: float  # time in which the pod both received and computed
  exposed: Intervals  # when the pod received and did not compute

  @property
  def exposed_secs(self) -> float:
    """Total length of `exposed`."""
    return length(self.exposed)


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
  """Returns the union of intervals as disjoint intervals, ascending."""
  merged: Intervals = []
  for start, end in sorted(each for each in intervals if each[0] < each[1]):
    if merged and start <= merged[-1][1]:
      merged[-1] = merged[-1][0], max(end, merged[-1][1])
    else:
      merged.append((start, end))
  return merged


def subtract(intervals: Intervals, others: Intervals) -> Intervals:
  """Returns `intervals` minus `others`; each list is disjoint and ascending."""
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


def length(intervals: Intervals) -> float:
  """Returns the total length of disjoint intervals, in seconds."""
  return sum(end - start for start, end in intervals)


def measure_received(
  trace: Trace, target: int, sources: Container[int] | None = None
) -> Received:
  """Sums up transfers to pod `target` from `sources`; None means all pods."""
  transfers = [
    x
    for x in trace.transfers
    if x.target == target and (sources is None or x.source in sources)
  ]
  # A transfer lasts from when the sender has the tensor until the receiver has
  # it. A pod computes while one of its devices runs an operation. On CPUs, even
  # a hidden transfer costs time, because the same processor computes and sends.
  receiving = union((x.ready, x.arrived) for x in transfers)
  computing = union(
    (x.start, x.end) for x in trace.operations if x.pod == target
  )
  exposed = subtract(receiving, computing)
  return Received(
    received_bytes=sum(x.num_bytes for x in transfers),
    hidden_secs=length(receiving) - length(exposed),
    exposed=exposed,
  )


def step_figures(trace: Trace) -> dict[str, float | int]:
  """Returns the metrics of a traced step, by name."""
  pods = [measure_received(trace, pod) for pod in range(trace.num_pods)]
  num_bytes = sum(x.received_bytes for x in pods)
  hidden = sum(x.hidden_secs for x in pods)
  exposed = sum(x.exposed_secs for x in pods)
  figures = {
    "traced_step_secs": trace.end,  # from the first record to the last
    # The bytes that all pods received. If all tokens have the same loss weight
    # and a step is one microbatch, the sum of loss weights is a constant, which
    # TensorFlow computes before the first step. So accounting/communication.py
    # predicts 4 bytes more per device.
    "traced_dcn_bytes": num_bytes,
    "traced_hidden_secs": hidden / len(pods),  # mean over pods
    "traced_exposed_secs": exposed / len(pods),  # mean over pods
  }
  # In 10^9 bits per second per pod. Transfers within one process have no rate,
  # because they take no time.
  if hidden + exposed:
    figures["traced_gbits_per_sec"] = num_bytes * 8e-9 / (hidden + exposed)
  return figures
