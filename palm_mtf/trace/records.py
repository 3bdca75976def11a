# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What TensorFlow's runtime recorded of a step, as operations and transfers.

Every device records when each of its operations ran. What crosses from one
server to another is recorded by the receiver: when the sender began to send,
and when all had arrived. That a tensor was ready is the end of the operation
that made it. So of each transfer three times are known:

  ready      the sender has computed the tensor
  sent       the receiver has asked for it, and the sender begins to send
  arrived    the receiver has it

A transfer lasts from `ready` to `arrived`. Pods of one process share memory:
the tensor is handed over as it is, nothing is recorded of that, and all three
times are the same.

A server records what it receives once a message of the client has told it to,
for which the client does not wait. So in a step of a few milliseconds the first
transfers may be missing; then `traced_dcn_bytes` is below `dcn_bytes`.

Times of servers on one host are of one clock. Those of several hosts are of
each host's own clock: TensorFlow moves `sent` to be after the request and
before the arrival, and `ready` is moved to be before `sent`; how operations of
two hosts lie to each other is as exact as their clocks are.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from palm_mtf._tf import tf
from palm_mtf.programs.train_program import TrainProgram

FORWARD, BACKWARD, EXCHANGE, UPDATE = PHASES = (
  "forward",
  "backward",
  "exchange",
  "update",
)
_EXCHANGE = re.compile(r"^(exchange|own_part)(_\d+)?/")
# By the scopes that the programs give their operations; the first that fits.
_PHASES = {
  EXCHANGE: _EXCHANGE,
  UPDATE: re.compile(r"/update(_\d+)?/|^sum_of_squares(_\d+)?/"),
  BACKWARD: re.compile(r"/gradients/|_sum/(add|read)(_\d+)?/"),
}
_UPDATED = re.compile(r"^(.+)/update(_\d+)?/")
_DEVICE = re.compile(
  r"(?:/job:(\w+))?(?:/replica:\d+)?(?:/task:(\d+))?/device:(\w+):(\d+)"
)
_RECEIVED = re.compile(r"edge_\d+_(\S+) from (\S+) to (\S+)$")
_MOST_OPERATIONS_TO_UPDATE = 4


@dataclasses.dataclass(frozen=True)
class Operation:
  """What a device did.

  Attributes:
    pod: that it was done for.
    device: its number within the pod's mesh.
    name: name of the operation.
    phase: one of PHASES. EXCHANGE is the sum over pods, and what makes a pod's
      own part of it.
    start: seconds after the step's beginning.
    end: seconds after the step's beginning.
  """

  pod: int
  device: int
  name: str
  phase: str
  start: float
  end: float


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A tensor that crossed between pods; times as in the module's docstring.

  Attributes:
    name: the variable whose gradient it is, or what made it.
    source: the pod that sent it.
    target: the pod that received it.
    num_bytes: its size.
    ready: seconds after the step's beginning.
    sent: seconds after the step's beginning.
    arrived: seconds after the step's beginning.
  """

  name: str
  source: int
  target: int
  num_bytes: int
  ready: float
  sent: float
  arrived: float


@dataclasses.dataclass(frozen=True)
class Trace:
  """One step of all pods.

  Attributes:
    num_pods: how many there are.
    last_call: when the last call into the session began, seconds: that with
      the last microbatches, the exchange and the update.
    operations: operations of all pods.
    transfers: between them.
    end: when the last of all that was recorded ended, seconds.
  """

  num_pods: int
  last_call: float
  operations: list[Operation]
  transfers: list[Transfer]
  end: float


@dataclasses.dataclass(frozen=True)
class _Span:
  """One record of a device, in nanoseconds since 1970.

  These are integers: a float64 would round them to a quarter of a microsecond.
  """

  device: tuple
  name: str
  start: int
  end: int
  num_bytes: int
  label: str


def read_trace(calls: Sequence[tf.RunMetadata], program: TrainProgram) -> Trace:
  """Returns what was recorded of one step.

  Args:
    calls: records of each call into the session, the last one at the end.
    program: that was run, in its graph.
  """
  graph, devices = program.step.graph, program.devices
  numbers = {
    _device(name): (pod, number)
    for pod, names in enumerate(devices.pods)
    for number, name in enumerate(names)
  }
  spans = [list(_spans(call)) for call in calls]
  begin = min(span.start for each in spans for span in each)
  operations, transfers = [], []
  early = _early(program)
  for each in spans:
    ran = [x for x in each if not x.label and x.device in numbers]
    transfers += _transfers(each, ran, graph, numbers)
    operations += [
      Operation(
        *numbers[x.device],
        x.name,
        _phase(x.name, early),
        x.start,
        x.end,
      )
      for x in ran
    ]
  return Trace(
    num_pods=len(devices.pods),
    last_call=(min(x.start for x in spans[-1]) - begin) / 1e9,
    operations=[_after(begin, x, "start", "end") for x in operations],
    transfers=[_after(begin, x, "ready", "sent", "arrived") for x in transfers],
    end=(max(x.end for each in spans for x in each) - begin) / 1e9,
  )


def _after(begin: int, record: Any, *names: str) -> Any:
  """Returns a record with seconds after `begin` instead of nanoseconds."""
  times = {name: (getattr(record, name) - begin) / 1e9 for name in names}
  return dataclasses.replace(record, **times)


def _device(name: str) -> tuple:
  job, task, kind, number = _DEVICE.match(name).groups()
  return job or "localhost", int(task or 0), kind.upper(), int(number)


def _spans(call: tf.RunMetadata) -> Iterator[_Span]:
  for device in call.step_stats.dev_stats:
    if not _DEVICE.fullmatch(device.device):
      continue  # a GPU's streams, beside the GPU
    for node in device.node_stats:
      received = node.node_name == "RecvTensor"
      # Of what is received there are no nanoseconds.
      begin = node.all_start_nanos or node.all_start_micros * 1000
      end = node.op_end_rel_nanos or node.op_end_rel_micros * 1000
      num_bytes = (
        node.output[0].tensor_description.allocation_description.requested_bytes
        if received
        else 0
      )
      label = node.timeline_label if received else ""
      yield _Span(
        _device(device.device),
        node.node_name,
        begin + node.op_start_rel_nanos,
        begin + end,
        num_bytes,
        label,
      )


def _early(program: TrainProgram) -> set[str]:
  """Returns the operations that a loss or an exchange needs."""
  todo = [x.op for pod in program.pods for x in (pod.loss, pod.weight_sum)]
  todo += [
    x for x in program.step.graph.get_operations() if _EXCHANGE.match(x.name)
  ]
  found = set()
  while todo:
    operation = todo.pop()
    if operation.name not in found:
      found.add(operation.name)
      todo += [x.op for x in operation.inputs]
      todo += operation.control_inputs
  return found


def _phase(name: str, early: set[str]) -> str:
  scoped = (phase for phase, scope in _PHASES.items() if scope.search(name))
  return next(scoped, FORWARD if name in early else UPDATE)


def _transfers(
  spans: Iterable[_Span],
  ran: Sequence[_Span],
  graph: tf.Graph,
  numbers: Mapping[tuple, tuple[int, int]],
) -> Iterator[Transfer]:
  """Yields what crossed between pods in one call."""
  ends = {(x.device, x.name): x.end for x in ran}
  yield from _in_process(graph, ends, numbers)
  for span in spans:
    if not span.label:
      continue
    name, *places = _RECEIVED.search(span.label).groups()
    source, target = map(_device, places)
    if source not in numbers or target not in numbers:
      continue  # from or to the client
    pods = numbers[source][0], numbers[target][0]
    if pods[0] == pods[1]:
      continue  # between hosts of a pod
    ready = min(ends.get((source, name), span.start), span.start)
    yield Transfer(
      _meaning(graph, name), *pods, span.num_bytes, ready, span.start, span.end
    )


def _in_process(
  graph: tf.Graph,
  ends: Mapping[tuple[tuple, str], int],
  numbers: Mapping[tuple, tuple[int, int]],
) -> Iterator[Transfer]:
  """Yields what operations of this process read of other pods' devices."""
  if any(device[0] != "localhost" for device in numbers):
    return
  seen = set()
  for operation in graph.get_operations():
    if not operation.device:  # it is where its variable is
      continue
    target = _device(operation.device)
    if (target, operation.name) not in ends:
      continue  # not of this step
    for x in operation.inputs:
      source = _device(x.op.device) if x.op.device else target
      ready = ends.get((source, x.op.name))
      if ready is None or numbers[source][0] == numbers[target][0]:
        continue
      if (x.name, target) in seen:  # what a device has is not sent again
        continue
      seen.add((x.name, target))
      yield Transfer(
        _meaning(graph, x.op.name),
        numbers[source][0],
        numbers[target][0],
        x.dtype.size * math.prod(x.shape.as_list()),
        *[ready] * 3,
      )


def _meaning(graph: tf.Graph, name: str) -> str:
  """Returns the variable that a tensor updates, or else who made the tensor."""
  try:
    level = [graph.get_operation_by_name(name)]
  except KeyError:  # of the runtime's own making
    return name
  for _ in range(_MOST_OPERATIONS_TO_UPDATE):
    level = [
      consumer
      for operation in level
      for x in operation.outputs
      for consumer in x.consumers()
    ]
    matches = filter(None, (_UPDATED.match(x.name) for x in level))
    variables = collections.Counter(match[1] for match in matches)
    if variables:
      return next(iter(variables)) if len(variables) == 1 else name
  return name
