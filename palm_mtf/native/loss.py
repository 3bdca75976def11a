# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The sums over logits that a loss needs, in C++, on one CPU device."""

from palm_mtf._tf import tf
from palm_mtf.native.operations import operations


def sum_logits(
  logits: tf.Tensor, targets: tf.Tensor, *, threads: int
) -> list[tf.Tensor]:
  """Returns the largest logit, the normalizer and the target's logit of rows.

  Args:
    logits: [rows, vocab], float32 or bfloat16.
    targets: [rows], int32; below 0 where these logits lack a row's target.
    threads: number of threads.

  Returns:
    The largest logit, the sum of exp(logits - largest), and the target's logit
    or 0, [rows] float32 each.
  """
  sums = operations().palm_sum_logits(
    logits=logits, targets=targets, threads=threads
  )
  sums.set_shape([logits.shape[0], 3])
  return tf.unstack(sums, axis=1)
