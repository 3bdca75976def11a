# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Which variables hold infinity or what is no number.

Each slice is looked at on the device that holds it; what is fetched is one
truth value a variable.
"""

from collections.abc import Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.mesh.placement import Slice


def build_finite_check(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns whether each variable is finite throughout, [variables], bool.

  Args:
    slices: of every variable; their names' order is that of the result.
  """
  first, *_ = (part for parts in slices.values() for part in parts)
  with tf.device(first.near):
    return tf.concat(
      [
        tf.reduce_all([_are_finite(x) for x in parts], axis=0)
        for parts in slices.values()
      ],
      axis=0,
    )


def _are_finite(part: Slice) -> tf.Tensor:
  """Returns whether a slice of each variable is, [names], bool."""
  value = part.read()
  with tf.device(part.near):
    of_names = tf.reshape(value, [len(part.names), -1])
    return tf.reduce_all(tf.math.is_finite(of_names), axis=1)
