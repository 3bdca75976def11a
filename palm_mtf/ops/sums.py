# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of all numbers of large tensors."""

import functools
from collections.abc import Callable

from palm_mtf._tf import tf
from palm_mtf.ops.xla import fused, in_xla_computation

# On a CPU XLA adds up one number after another, each addition waiting for the
# one before. It adds the eight parts of a tensor to one part as many numbers at
# once as the CPU can, and on all cores. (Of sixteen parts older CPUs are slow.)
# TensorFlow's sums would have other bits on another number of cores.
_PARTS = 8

# Sums of so many numbers XLA would give to YNNPACK. In TensorFlow 2.21 two
# threads may prepare one such sum at a time, and both write to a list that no
# lock guards (`EmitYnnFusionBuilder`): a training process in a thousand or so
# ended by a signal in its first step.
_MOST = 4096


@fused
def _sum(x):
  while x.shape[0] >= _MOST:
    x = tf.pad(x, [[0, -x.shape[0] % _PARTS]])
    x = functools.reduce(tf.add, tf.unstack(tf.reshape(x, [_PARTS, -1])))
  return tf.reduce_sum(x)


def fused_sum(fn: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
  """Compiles the sum of what an element-wise function returns, [] float32.

  It has the same bits on any number of cores. Decorate functions of a module,
  as with `fused`.
  """

  @fused
  @functools.wraps(fn)
  def part(*args: object) -> tf.Tensor:
    x = fn(*args)
    parts = _PARTS if x.shape.num_elements() % _PARTS == 0 else 1
    return tf.reduce_sum(tf.reshape(x, [parts, -1]), 0)

  @functools.wraps(fn)
  def call(*args: object) -> tf.Tensor:
    if in_xla_computation():
      return tf.reduce_sum(fn(*args))
    return _sum(part(*args))

  return call
