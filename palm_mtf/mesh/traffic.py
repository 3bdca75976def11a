# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a lowered program moves between devices, by collective and axes.

They are read off the TensorFlow graph: nothing is counted that the fetches do
not need, and nothing that a device has already. Between CPUs or GPUs that is
edge by edge. A program for TPUs has an operation for a collective, which counts
as what XLA is to make of it.
"""

import collections
import math
from collections.abc import Iterable, Iterator

from palm_mtf._tf import tf
from palm_mtf.mesh.collectives import ALL_REDUCE, collective_of
from palm_mtf.ops.xla import in_tpu_program

_CROSS_REPLICA = ("CrossReplicaSum", "XlaAllReduce", "XlaReduceScatter")

# Kind and axes, as in collectives.py.
Traffic = collections.Counter[tuple[str, tuple[str, ...]]]


def traffic(fetches: Iterable[tf.Operation | tf.Tensor]) -> Traffic:
  """Returns the bytes that collectives move when `fetches` are run.

  Args:
    fetches: tensors and operations of one graph.
  """
  moved: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
  sizes = {}
  in_program: Traffic = collections.Counter()
  for op in needed(fetches):
    collective = collective_of(op.name)
    if not collective:
      continue
    if op.type in _CROSS_REPLICA:
      in_program[collective] += _cross_replica_bytes(op, collective[0])
    if in_tpu_program(op):
      continue
    end = _device(op)
    for x in op.inputs:
      if _device(x.op) != end:
        # What several operations of a device read is sent once.
        moved[x.name, end] = collective
        sizes[x.name] = x.dtype.size * math.prod(x.shape.as_list())
  totals = in_program
  for (name, _), collective in moved.items():
    totals[collective] += sizes[name]
  return totals


def _cross_replica_bytes(op: tf.Operation, kind: str) -> int:
  """Returns what a collective of a TPU program moves, of all devices."""
  x, groups = op.inputs[:2]
  num_groups, n = groups.shape.as_list()
  num_bytes = x.dtype.size * math.prod(x.shape.as_list())
  ways = 2 if kind == ALL_REDUCE else 1
  return num_groups * ways * (n - 1) * num_bytes


def needed(
  fetches: Iterable[tf.Operation | tf.Tensor],
) -> Iterator[tf.Operation]:
  """Yields the operations that run when `fetches` are."""
  todo = [x.op if isinstance(x, tf.Tensor) else x for x in fetches]
  seen = set(todo)
  while todo:
    op = todo.pop()
    yield op
    before = {*op.control_inputs, *(x.op for x in op.inputs)} - seen
    seen |= before
    todo += before


def _device(op: tf.Operation) -> str:
  """Returns where an operation runs; an access to a variable, where that is."""
  if op.device:
    return op.device
  return _device(op.inputs[0].op) if len(op.inputs) else ""
