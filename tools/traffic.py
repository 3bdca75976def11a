# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Counts the bytes that a lowered program moves, by collective."""

import collections
import math
import re
from collections.abc import Iterable, Iterator

from palm_mtf._tf import tf
from palm_mtf.mesh.cpu_gpu import (
  ALL_GATHER,
  ALL_REDUCE,
  ALL_TO_ALL,
  REDUCE_SCATTER,
)

# The bytes are counted in the TensorFlow graph. Operations that the fetches do
# not need, and tensors that a device already has, do not count. Between CPUs or
# GPUs, bytes move along edges from one device to another. On TPUs, one
# operation of these types stands for the traffic of all TPUs of a pod.
_CROSS_REPLICA = ("CrossReplicaSum", "XlaAllReduce", "XlaReduceScatter")

_SCOPE = re.compile(
  rf"(?:^|/)({ALL_REDUCE}|{ALL_GATHER}|{ALL_TO_ALL}|{REDUCE_SCATTER})"
  r"\.([a-z]+(?:\.[a-z]+)*)(?:_\d+)?/"
)

# Bytes, by kind of collective and mesh axes.
Traffic = collections.Counter[tuple[str, tuple[str, ...]]]


def traffic(fetches: Iterable[tf.Operation | tf.Tensor]) -> Traffic:
  """Returns the bytes that collectives move when `fetches` are run.

  Args:
    fetches: tensors and operations of one graph.
  """
  totals: Traffic = collections.Counter()
  seen = set()
  for op in needed(fetches):
    collective = collective_of(op.name)
    if not collective:
      continue
    if op.type in _CROSS_REPLICA:
      totals[collective] += _cross_replica_bytes(op, collective[0])
      continue
    end = _device(op)
    for x in op.inputs:
      # A tensor that several operations of a device read is sent once.
      # Operations within a TPU's program have no device.
      if _device(x.op) not in ("", end) and end and (x.name, end) not in seen:
        seen.add((x.name, end))
        totals[collective] += _num_bytes(x)
  return totals


def _num_bytes(x: tf.Tensor) -> int:
  return x.dtype.size * math.prod(x.shape.as_list())


def _cross_replica_bytes(op: tf.Operation, kind: str) -> int:
  """Returns the bytes that a TPU collective moves, for all devices."""
  x, groups = op.inputs[:2]
  num_groups, n = groups.shape.as_list()
  # An all-reduce is a reduce-scatter and an all-gather.
  ways = 2 if kind == ALL_REDUCE else 1
  return num_groups * ways * (n - 1) * _num_bytes(x)


def needed(
  fetches: Iterable[tf.Operation | tf.Tensor],
) -> Iterator[tf.Operation]:
  """Yields the operations that run when `fetches` are run."""
  todo = [x.op if isinstance(x, tf.Tensor) else x for x in fetches]
  seen = set(todo)
  while todo:
    op = todo.pop()
    yield op
    before = {*op.control_inputs, *(x.op for x in op.inputs)} - seen
    seen |= before
    todo += before


def _device(op: tf.Operation) -> str:
  """Returns an operation's device; for a variable access, the variable's."""
  if op.device or not op.inputs or op.inputs[0].dtype != tf.resource:
    return op.device
  return op.inputs[0].op.device


def collective_of(operation: str) -> tuple[str, tuple[str, ...]] | None:
  """Returns kind and axes of an operation's collective, from its name."""
  found = _SCOPE.search(operation)
  return (found[1], tuple(found[2].split("."))) if found else None
