# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reduce-scatter and all-gather between devices, operation by operation."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf

# Each device has one of xs, alike in shape and dtype; part i is device i's.


def reduce_scatter_ring(
  xs: Sequence[tf.Tensor], devices: Sequence[str], axis: int
) -> list[tf.Tensor]:
  """Returns on each device its part, cut along `axis`, of the sum of all."""
  n = len(xs)
  if n == 1:
    return list(xs)
  # [device, part]
  parts = mtf.parallel(devices, lambda x: tf.split(x, n, axis), xs)
  sums = []
  # Part i goes once around the ring, from the device behind device i to device
  # i, and grows on its way. At each hop every device sends and receives one
  # part; the order of a sum is fixed, so that its bits are.
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
  """Returns on each device the parts of all, joined along `axis`."""
  if len(xs) == 1:
    return list(xs)
  whole = []
  # Each device reads every other one's part. Mesh TensorFlow's ring moves the
  # same bytes, with one operation for each hop of each part.
  for device in devices:
    with tf.device(device):
      whole.append(tf.concat(xs, axis))
  return whole
