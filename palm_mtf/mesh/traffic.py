# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Bytes that a lowered program moves between devices, by collective and axes.

They are read off the TensorFlow graph, edge by edge: nothing is counted that
the fetches do not need, and nothing that a device has already.
"""

import collections
import math
from collections.abc import Iterable, Iterator

from palm_mtf._tf import tf
from palm_mtf.mesh.collectives import collective_of

# Kind and axes, as in collectives.py.
Traffic = collections.Counter[tuple[str, tuple[str, ...]]]


def traffic(fetches: Iterable[tf.Operation | tf.Tensor]) -> Traffic:
  """Returns the bytes that collectives move when `fetches` are run.

  Args:
    fetches: of one graph.
  """
  moved: dict[tuple[str, str], tuple[str, tuple[str, ...]]] = {}
  sizes = {}
  for op in _needed(fetches):
    collective = collective_of(op.name)
    if not collective:
      continue
    end = _device(op)
    for x in op.inputs:
      if _device(x.op) != end:
        # What several operations of a device read is sent once.
        moved[x.name, end] = collective
        sizes[x.name] = x.dtype.size * math.prod(x.shape.as_list())
  totals: Traffic = collections.Counter()
  for (name, _), collective in moved.items():
    totals[collective] += sizes[name]
  return totals


def _needed(
  fetches: Iterable[tf.Operation | tf.Tensor],
) -> Iterator[tf.Operation]:
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
