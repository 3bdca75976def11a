# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention of a sequence to itself, in C++, on one CPU device."""

from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.native.operations import operations, with_shapes


def attend(
  q: tf.Tensor,
  k: tf.Tensor,
  v: tf.Tensor,
  masks: Sequence[tf.Tensor],
  *,
  threads: int,
) -> tf.Tensor:
  """Attends from every position to those that it sees, [shape of q].

  Args:
    q: [batch, length, heads, d_kv], float32 or bfloat16.
    k: that, or [batch, length, d_kv], one head for all.
    v: shape of k.
    masks: segments, or segments and a prefix, [batch, length] int32 each; see
      `self_attention`.
    threads: number of threads.
  """
  out = operations().palm_attention(
    q=q, k=k, v=v, masks=list(masks), threads=threads
  )
  out.set_shape(q.shape)
  return out


def attend_gradient(
  q: tf.Tensor,
  k: tf.Tensor,
  v: tf.Tensor,
  dout: tf.Tensor,
  masks: Sequence[tf.Tensor],
  *,
  threads: int,
) -> tuple[tf.Tensor, ...]:
  """Returns the gradients of q, k and v; see `attend`."""
  gradients = operations().palm_attention_gradient(
    q=q, k=k, v=v, dout=dout, masks=list(masks), threads=threads
  )
  return tuple(with_shapes(gradients, (q, k, v)))
