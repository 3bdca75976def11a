# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Writes a traced step: MODEL_DIR/traces/step_00000020.json.

chrome://tracing and ui.perfetto.dev show the file. The lane "pod 0" has the
operations of pod 0, and the lane "pod 0 -> pod 1" the transfers from pod 0 to
pod 1. Times are in microseconds. The file also has the time in which a pod
receives, split by whether the pod computes meanwhile:

receiving   ------######------####---
computing   #########------##########
                  hhheee      hhhh      hidden, exposed
"""

import heapq
import itertools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import tf
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.trace.records import Operation, Trace, Transfer, read_trace

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


_SHORTEST_SECS = 1e-6


class WrittenTrace(NamedTuple):
  """The result of writing a trace."""

  says: str  # the line for stderr
  figures: Mapping[str, float]  # the step's metrics by name


def write_trace(
  model_dir: str,
  step: int,
  program: TrainProgram,
  calls: Sequence[tf.RunMetadata],
) -> WrittenTrace:
  """Writes a step's trace file, given the record of each session call."""
  trace = read_trace(calls, program)
  path = f"{ModelDir(model_dir).trace(step)}.json"
  write_atomically(path, json_text(chrome_trace(trace, step)).encode())
  figures = step_figures(trace)
  return WrittenTrace(
    f"{_headline(step, trace.num_pods, figures)}: {path}", figures
  )


def _headline(step: int, num_pods: int, figures: Mapping[str, float]) -> str:
  text = f"step {step} took {_ms(figures['traced_step_secs'])}"
  if num_pods == 1:
    return text
  text += f"; {figures['traced_dcn_bytes'] / 1e6:,.1f} MB crossed between pods"
  # Pods of one process pass tensors in memory, so there is no transfer rate.
  if "traced_gbits_per_sec" not in figures:
    return f"{text}, in memory"
  return (
    f"{text} at {figures['traced_gbits_per_sec']:.2f} Gb/s, "
    f"{_ms(figures['traced_hidden_secs'])} of it hidden by computation, "
    f"{_ms(figures['traced_exposed_secs'])} exposed"
  )


def _ms(secs: float) -> str:
  return f"{1e3 * secs:,.3g} ms" if secs < 1 else f"{1e3 * secs:,.0f} ms"


def chrome_trace(trace: Trace, step: int) -> dict[str, Any]:
  """Returns the content of a step's trace file."""
  # Most operations are too short to be seen in a viewer; omit these operations.
  operations = [
    x for x in trace.operations if x.end - x.start >= _SHORTEST_SECS
  ]
  # Lanes of pods come first, then a lane for each direction of transfers.
  events: list[dict] = []
  for pod in range(trace.num_pods):
    of_pod = [x for x in operations if x.pod == pod]
    events += _lane(f"pod {pod}", pod, [_operation(x) for x in of_pod])
  directions = sorted({(x.source, x.target) for x in trace.transfers})
  for number, (source, target) in enumerate(directions, start=trace.num_pods):
    crossed = [
      _transfer(x)
      for x in trace.transfers
      if (x.source, x.target) == (source, target)
    ]
    events += _lane(f"pod {source} -> pod {target}", number, crossed)
  return {
    "displayTimeUnit": "ms",
    "traceEvents": events,
    "otherData": {
      "step": step,
      "num_pods": trace.num_pods,
      "directions": [
        _direction(trace, number, *places)
        for number, places in enumerate(directions, start=trace.num_pods)
      ],
      "last_call": _micros(trace.last_call),
      "figures": step_figures(trace),
    },
  }


def _direction(
  trace: Trace, number: int, source: int, target: int
) -> dict[str, Any]:
  crossed = measure_received(trace, target, [source])
  return {
    "pid": number,
    "source": source,
    "target": target,
    "bytes": crossed.received_bytes,
    "hidden_usecs": _micros(crossed.hidden_secs),
    "exposed_usecs": _micros(crossed.exposed_secs),
    "exposed": [[_micros(a), _micros(b)] for a, b in crossed.exposed],
  }


def _micros(secs: float) -> float:
  return round(secs * 1e6, 3)


def _operation(operation: Operation) -> dict[str, Any]:
  return {
    "name": operation.name,
    "cat": operation.phase,
    "ts": _micros(operation.start),
    "dur": _micros(operation.end - operation.start),
    "args": {"device": operation.device},
  }


def _transfer(transfer: Transfer) -> dict[str, Any]:
  return {
    "name": transfer.name,
    "cat": "transfer",
    "ts": _micros(transfer.ready),
    "dur": _micros(transfer.arrived - transfer.ready),
    "args": {
      "bytes": transfer.num_bytes,
      "usecs until sent": _micros(transfer.sent - transfer.ready),
    },
  }


def _lane(
  name: str, number: int, events: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
  """Yields a lane's events; events that overlap get different rows."""
  # In Chrome's format, a lane is a process ("pid"), and a row in the lane is a
  # thread ("tid"). "M" events are metadata.
  for kind, key, value in (
    ("process_name", "name", name),
    ("process_sort_index", "sort_index", number),
  ):
    yield {"ph": "M", "name": kind, "pid": number, "args": {key: value}}
  free: list[tuple[float, int]] = []  # (end of the row's last event, row)
  for event in sorted(events, key=lambda each: each["ts"]):
    row = len(free)
    if free and free[0][0] <= event["ts"]:
      _, row = heapq.heappop(free)
    heapq.heappush(free, (event["ts"] + event["dur"], row))
    yield {"ph": "X", "pid": number, "tid": row, **event}
