# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What moves within a mesh: its names, and the two that are ours.

Among n devices with S bytes each, all of them together move

  all-reduce      2 (n - 1) S   Mesh TensorFlow's, in rings
  reduce-scatter    (n - 1) S   ours: each device ends with its nth of the sum
  all-gather        (n - 1) S   ours: each device reads from every other one; S
                                is what each ends with

The operations of each stand in a name scope that says which it is and over
which axes, so that traffic.py can count what a lowered program moves.
"""

import re
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf

ALL_REDUCE = "all_reduce"
ALL_GATHER = "all_gather"
REDUCE_SCATTER = "reduce_scatter"

_SCOPE = re.compile(
  rf"(?:^|/)({ALL_REDUCE}|{ALL_GATHER}|{REDUCE_SCATTER})"
  r"\.([a-z]+(?:\.[a-z]+)*)(?:_\d+)?/"
)


def scope_of(kind: str, axes: Sequence[str]) -> str:
  """Returns the name scope of a collective over mesh axes."""
  return ".".join([kind, *axes])


def collective_of(operation: str) -> tuple[str, tuple[str, ...]] | None:
  """Returns kind and axes of the collective that an operation is part of.

  Args:
    operation: its name.
  """
  found = _SCOPE.search(operation)
  return (found[1], tuple(found[2].split("."))) if found else None


def reduce_scatter_ring(
  xs: Sequence[tf.Tensor], devices: Sequence[str], axis: int
) -> list[tf.Tensor]:
  """Returns on each device its part of the sum of all tensors.

  Each part goes once around, from behind its device to it, and grows: every
  device sends and receives a part at a time, and the order of a sum is fixed.

  Args:
    xs: one on each device, alike in shape and dtype.
    devices: in the order of the parts.
    axis: the dimension that is cut, divisible by their number.
  """
  n = len(xs)
  if n == 1:
    return list(xs)
  # [device, part]
  parts = mtf.parallel(devices, lambda x: tf.split(x, n, axis), xs)
  sums = []
  for part in range(n):
    total = parts[(part + 1) % n][part]
    for distance in range(2, n + 1):
      place = (part + distance) % n
      with tf.device(devices[place]):
        total = tf.add(total, parts[place][part])
    sums.append(total)
  return sums


def all_gather_direct(
  xs: Sequence[tf.Tensor], devices: Sequence[str], axis: int
) -> list[tf.Tensor]:
  """Returns on each device the parts of all, joined.

  In Mesh TensorFlow's ring a part passes every device on its way, an operation
  each; the bytes are the same.

  Args:
    xs: one on each device, alike in shape and dtype.
    devices: in the order of the parts.
    axis: the dimension that is joined.
  """
  if len(xs) == 1:
    return list(xs)
  whole = []
  for device in devices:
    with tf.device(device):
      whole.append(tf.concat(xs, axis))
  return whole
