# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One number for all bits of a variable, to compare copies by.

  fingerprint = sum over slices s and numbers i of
                  bits (2 i + 1) (2 s + 1)            mod 2^64

Integers add up to the same in any order. An odd factor has an inverse, so that
one changed number is always seen, and two that were exchanged as well. Each
slice is read on the device that holds it; one integer leaves it.
"""

from collections.abc import Mapping, Sequence

from palm_mtf._tf import fused, tf
from palm_mtf.mesh.placement import Slice

_BITS = {tf.float32: tf.uint32, tf.bfloat16: tf.uint16}


@fused
def _of_slices(x):
  """Returns the sum over i for each row of x, [names, numbers]."""
  bits = tf.cast(tf.bitcast(x, _BITS[x.dtype]), tf.int64)
  place = tf.range(x.shape[1], dtype=tf.int64)
  return tf.reduce_sum(bits * (2 * place + 1), axis=1)


def build_fingerprints(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns the fingerprint of each variable, [variables], int64.

  Args:
    slices: of one pod; their names' order is that of the result.
  """
  first, *_ = (part for parts in slices.values() for part in parts)
  with tf.device(first.near):
    return tf.concat([_of_variables(x) for x in slices.values()], axis=0)


def _of_variables(parts: Sequence[Slice]) -> tf.Tensor:
  numbers = []
  for index, part in enumerate(parts):
    value = part.read()
    with tf.device(part.near):
      of_names = tf.reshape(value, [len(part.names), -1])
      numbers.append(_of_slices(of_names) * (2 * index + 1))
  return tf.add_n(numbers)
