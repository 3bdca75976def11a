# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""TRACE_STEPS: writes a traced step to MODEL_DIR/traces/step_00000020.json.

A traced step has the same feeds and fetches as every other step, and computes
the same bits. Each host's times are from its own clock.

chrome://tracing and ui.perfetto.dev show the file. The lane "pod 0" has the
operations of pod 0, and the lane "pod 0 -> pod 1" the transfers from pod 0 to
pod 1. Times are in microseconds. The file also has the time in which a pod
receives, split by whether the pod computes meanwhile:

receiving   ------######------####---
computing   #########------##########
                  hhheee      hhhh      hidden, exposed
"""

import dataclasses
import heapq
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import tf
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.paths import ModelDir
from palm_mtf.programs.step_programs import StepPrograms

_UPDATED = re.compile(r"^(.+)/update(_\d+)?/")
_DEVICE = re.compile(
  r"(?:/job:(\w+))?(?:/replica:\d+)?(?:/task:(\d+))?/device:(\w+):(\d+)"
)
# TensorFlow's label of a received tensor: its operation, sender and receiver.
_RECEIVED = re.compile(r"edge_\d+_(\S+) from (\S+) to (\S+)$")
# A received gradient gets the name of the variable that it updates, if at most
# so many operations lead from one to the other.
_MOST_OPERATIONS_TO_UPDATE = 4


@dataclasses.dataclass(frozen=True)
class Operation:
  """An operation that a device ran; times are seconds since the step began."""

  pod: int
  device: int  # number of the device in the pod's mesh
  name: str
  # "forward", "backward", "exchange" or "update"; "exchange" includes
  # reduce-scatters within the pod.
  phase: str
  start: float
  end: float


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A tensor sent from pod to pod; times are seconds since the step began.

  Within a process, tensors stay in memory, so the three times are equal.
  """

  name: str  # for a gradient, its variable's name; otherwise the operation's
  source: int  # number of the sending pod
  target: int  # number of the receiving pod
  num_bytes: int
  ready: float  # when the sender has computed the tensor
  sent: float  # when sending starts, after the receiver's request
  arrived: float  # when the receiver has the tensor


@dataclasses.dataclass(frozen=True)
class Trace:
  """A traced step of all pods; times are seconds since the step began."""

  num_pods: int
  operations: list[Operation]
  transfers: list[Transfer]
  end: float  # end of the last record; seconds from the start of the step


class _Span(NamedTuple):
  """One record of TensorFlow: an operation that ran, or a received tensor."""

  device: tuple  # such as ("worker", 1, "CPU", 0): job, task, type, index
  # As read, nanoseconds since 1970, as whole numbers, because a float64 would
  # round them to a quarter of a microsecond. `read_trace` converts them to
  # seconds since the step began.
  start: float
  end: float
  record: Any  # TensorFlow's NodeExecStats, with names and sizes

  @property
  def is_received(self) -> bool:
    """Whether the record is of a received tensor."""
    return self.record.node_name == "RecvTensor"


def read_trace(calls: Sequence[tf.RunMetadata], program: StepPrograms) -> Trace:
  """Returns the trace of a step, given the record of each session call."""
  devices, graph = program.devices, program.update.inputs["step"].graph
  # {device: (pod, device's index in the pod)}, without the client's devices.
  numbers = {
    _parse_device(name): (pod, number)
    for pod, names in enumerate(devices.pods)
    for number, name in enumerate(names)
  }
  spans = [list(_read_spans(call)) for call in calls]
  begin = min(span.start for each in spans for span in each)
  spans = [
    [
      x._replace(start=(x.start - begin) / 1e9, end=(x.end - begin) / 1e9)
      for x in each
    ]
    for each in spans
  ]
  operations, transfers = [], []
  for each in spans:
    ran = [x for x in each if not x.is_received and x.device in numbers]
    transfers += _read_transfers(each, ran, graph, numbers)
    for x in ran:
      name = x.record.node_name
      phase = _find_phase(name, program.phases)
      operations.append(
        Operation(*numbers[x.device], name, phase, x.start, x.end)
      )
  return Trace(
    num_pods=len(devices.pods),
    operations=operations,
    transfers=transfers,
    end=max(x.end for each in spans for x in each),
  )


def _parse_device(name: str) -> tuple:
  job, task, kind, number = _DEVICE.match(name).groups()
  return job or "localhost", int(task or 0), kind.upper(), int(number)


def _read_spans(call: tf.RunMetadata) -> Iterator[_Span]:
  for device in call.step_stats.dev_stats:
    if not _DEVICE.fullmatch(device.device):
      continue  # a GPU's stream: it repeats records of the GPU
    place = _parse_device(device.device)
    for x in device.node_stats:
      # Records of received tensors have times only in microseconds.
      begin = x.all_start_nanos or x.all_start_micros * 1000
      end = x.op_end_rel_nanos or x.op_end_rel_micros * 1000
      yield _Span(place, begin + x.op_start_rel_nanos, begin + end, x)


def _find_phase(name: str, phases: Mapping[str, str]) -> str:
  """Returns the phase of an operation, by the innermost scope of its name."""
  while name:
    name = name.rpartition("/")[0]
    if f"{name}/" in phases:
      return phases[f"{name}/"]
  return "update"  # metrics of the step


def _read_transfers(
  spans: Iterable[_Span],
  ran: Sequence[_Span],
  graph: tf.Graph,
  numbers: Mapping[tuple, tuple[int, int]],
) -> Iterator[Transfer]:
  """Yields the transfers between pods in one call into the session."""
  # The sender's operation ends when the tensor is ready. The receiver records
  # when sending starts, and when the tensor arrives. If a step takes only
  # milliseconds, its first transfers may be missing, because the client does
  # not wait until a server has started to record.
  ends = {(x.device, x.record.node_name): x.end for x in ran}
  yield from _infer_transfers(graph, ends, numbers)
  for span in spans:
    if not span.is_received:
      continue
    name, *places = _RECEIVED.search(span.record.timeline_label).groups()
    source, target = map(_parse_device, places)
    if source not in numbers or target not in numbers:
      continue  # the client, not a pod, sent or received the tensor
    pods = numbers[source][0], numbers[target][0]
    if pods[0] == pods[1]:
      continue  # both servers belong to one pod
    # The sender's clock may run ahead, so TensorFlow clamps the send time to
    # the interval from the receiver's request to the arrival. Clamp `ready`
    # too, to be no later than the send time.
    ready = min(ends.get((source, name), span.start), span.start)
    sent = span.record.output[0].tensor_description.allocation_description
    times = ready, span.start, span.end
    yield Transfer(
      _find_variable(graph, name), *pods, sent.requested_bytes, *times
    )


def _infer_transfers(
  graph: tf.Graph,
  ends: Mapping[tuple[tuple, str], float],
  numbers: Mapping[tuple, tuple[int, int]],
) -> Iterator[Transfer]:
  """Yields transfers between pods of this process; TensorFlow records none."""
  if any(device[0] != "localhost" for device in numbers):
    return
  seen = set()
  for operation in graph.get_operations():
    if not operation.device:  # reads a variable on its device: no transfer
      continue
    target = _parse_device(operation.device)
    if (target, operation.name) not in ends:
      continue  # this call did not run the operation
    for x in operation.inputs:
      source = _parse_device(x.op.device) if x.op.device else target
      ready = ends.get((source, x.op.name))
      if ready is None or (x.name, target) in seen:
        continue  # not computed, or already sent to this device
      seen.add((x.name, target))
      pods = numbers[source][0], numbers[target][0]
      if pods[0] != pods[1]:
        name = _find_variable(graph, x.op.name)
        num_bytes = x.dtype.size * math.prod(x.shape.as_list())
        yield Transfer(name, *pods, num_bytes, *[ready] * 3)


def _find_variable(graph: tf.Graph, name: str) -> str:
  """Returns the name of the only variable that an operation's outputs update.

  If there is not exactly one such variable, returns the operation's name.
  """
  try:
    level = [graph.get_operation_by_name(name)]
  except KeyError:  # TensorFlow's runtime added the operation
    return name
  for _ in range(_MOST_OPERATIONS_TO_UPDATE):
    level = [
      consumer
      for operation in level
      for x in operation.outputs
      for consumer in x.consumers()
    ]
    matches = (_UPDATED.match(x.name) for x in level)
    variables = {match[1] for match in matches if match}
    if variables:
      return variables.pop() if len(variables) == 1 else name
  return name


def union_secs(intervals: Iterable[tuple[float, float]]) -> float:
  """Returns the length of the union of intervals (start, end) in seconds."""
  total, last = 0.0, -math.inf
  for start, end in sorted(intervals):
    total += max(0.0, end - max(start, last))
    last = max(last, end)
  return total


def step_figures(trace: Trace) -> dict[str, float | int]:
  """Returns the metrics of a traced step, by name."""
  receiving_secs = exposed_secs = 0.0
  # A transfer lasts from when the sender has the tensor until the receiver has
  # it. A pod computes while one of its devices runs an operation. On CPUs, even
  # a hidden transfer costs time, because the same processor computes and sends.
  for pod in range(trace.num_pods):
    receiving = [
      (x.ready, x.arrived) for x in trace.transfers if x.target == pod
    ]
    computing = [(x.start, x.end) for x in trace.operations if x.pod == pod]
    receiving_secs += union_secs(receiving)
    exposed_secs += union_secs(receiving + computing) - union_secs(computing)
  num_bytes = sum(x.num_bytes for x in trace.transfers)
  hidden_secs = receiving_secs - exposed_secs
  figures = {
    "traced_step_secs": trace.end,  # from the first record to the last
    # Received by all pods. accounting/communication.py predicts 4 bytes more
    # per device, for the sum of loss weights. Pods do not send this sum if it
    # is constant: all tokens weigh the same, and a step is one microbatch.
    "traced_dcn_bytes": num_bytes,
    "traced_hidden_secs": hidden_secs / trace.num_pods,  # mean over pods
    "traced_exposed_secs": exposed_secs / trace.num_pods,  # mean over pods
  }
  # 10^9 bits/s per pod. Transfers within one process take no time, so no rate.
  if receiving_secs:
    figures["traced_gbits_per_sec"] = num_bytes * 8e-9 / receiving_secs
  return figures


_SHORTEST_SECS = 1e-6


def write_trace(
  model_dir: str,
  step: int,
  program: StepPrograms,
  calls: Sequence[tf.RunMetadata],
) -> tuple[str, dict[str, float]]:
  """Writes a step's trace file, given the record of each session call.

  Returns the line for stderr, and the step's metrics by name.
  """
  trace = read_trace(calls, program)
  path = f"{ModelDir(model_dir).trace(step)}.json"
  write_atomically(path, json_text(chrome_trace(trace, step)).encode())
  figures = step_figures(trace)
  return f"{_headline(step, trace.num_pods, figures)}: {path}", figures


def _headline(step: int, num_pods: int, figures: Mapping[str, float]) -> str:
  text = f"step {step} took {_ms(figures['traced_step_secs'])}"
  if num_pods == 1:
    return text
  text += f"; {figures['traced_dcn_bytes'] / 1e6:,.1f} MB crossed between pods"
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
  # Lanes of pods come first, then a lane for each direction of transfers.
  events: list[dict] = []
  for pod in range(trace.num_pods):
    # Omit operations that are too short to be seen in a viewer, as most are.
    of_pod = [
      _event(x.name, x.phase, x.start, x.end, {"device": x.device})
      for x in trace.operations
      if x.pod == pod and x.end - x.start >= _SHORTEST_SECS
    ]
    events += _lane(f"pod {pod}", pod, of_pod)
  for number, (source, target) in enumerate(
    sorted({(x.source, x.target) for x in trace.transfers}), trace.num_pods
  ):
    crossed = []
    for x in trace.transfers:
      if (x.source, x.target) == (source, target):
        sent = _micros(x.sent - x.ready)
        details = {"bytes": x.num_bytes, "usecs until sent": sent}
        crossed.append(_event(x.name, "transfer", x.ready, x.arrived, details))
    events += _lane(f"pod {source} -> pod {target}", number, crossed)
  return {
    "displayTimeUnit": "ms",
    "traceEvents": events,
    "otherData": {
      "step": step,
      "num_pods": trace.num_pods,
      "figures": step_figures(trace),
    },
  }


def _micros(secs: float) -> float:
  return round(secs * 1e6, 3)


def _event(
  name: str, kind: str, start: float, end: float, details: Mapping[str, Any]
) -> dict[str, Any]:
  times = {"ts": _micros(start), "dur": _micros(end - start)}
  return {"name": name, "cat": kind, **times, "args": details}


def _lane(
  name: str, number: int, events: Sequence[dict[str, Any]]
) -> Iterator[dict[str, Any]]:
  """Yields the events of a lane; rows of the lane hold no two at a time."""
  # In Chrome's format, a lane is a process ("pid"), and a row in the lane is a
  # thread ("tid"). "M" events are metadata.
  for key, value in (("name", name), ("sort_index", number)):
    about = {"name": f"process_{key}", "args": {key: value}}
    yield {"ph": "M", "pid": number, **about}
  free: list[tuple[float, int]] = []  # (microseconds when it is free, row)
  for event in sorted(events, key=lambda each: each["ts"]):
    row = len(free)
    if free and free[0][0] <= event["ts"]:
      _, row = heapq.heappop(free)
    heapq.heappush(free, (event["ts"] + event["dur"], row))
    yield {"ph": "X", "pid": number, "tid": row, **event}
