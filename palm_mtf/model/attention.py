# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over one shared key and value head, or over one per head.

  weights = softmax(q k / sqrt(d_kv), over memory_length <= length)
  out     = weights v

Where rows hold several documents, the softmax is over those positions of its
range that lie in the same segment; weights of all others are exactly zero.

The two products run as matrix products; scale, mask and softmax between them
are one pass in float32, and so is their gradient. In multi-query attention the
`heads` of one sequence fold into the rows of a single product, because all of
them meet the same keys: no transpose, no copy of k and v per head.
"""

from collections.abc import Callable

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.bfloat16 import einsum
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused


def visible_softmax(
  scores: tf.Tensor, visible: tf.Tensor, scale: float | tf.Tensor
) -> tf.Tensor:
  """Returns the softmax of scaled scores, in float32, over what is visible.

  Args:
    scores: [..., memory_length], any float dtype.
    visible: bool, broadcast to the scores; elsewhere weights are zero.
    scale: factor of the scores.

  Returns:
    The shape and dtype of the scores.
  """
  x = tf.cast(scores, tf.float32) * scale
  x = tf.where_v2(visible, x, x.dtype.min)
  x = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
  return tf.cast(x / tf.reduce_sum(x, -1, keepdims=True), scores.dtype)


@fused
def _causal_softmax(scores, scale, segments=None):
  """Returns the attention weights of scores [batch, length, heads, memory]."""
  _, length, _, memory_length = scores.shape
  position = tf.range(length)[:, tf.newaxis, tf.newaxis]
  visible = tf.range(memory_length) <= position
  if segments is not None:
    segments = segments[:, :, tf.newaxis, tf.newaxis]
    visible &= tf.equal(segments, tf.transpose(segments, [0, 2, 3, 1]))
  return visible_softmax(scores, visible, scale)


@fused
def _causal_softmax_gradient(weights, dweights, out, dout, scale):
  """Returns dscores = scale * weights * (dweights - sum(weights * dweights)).

  The sum over memory_length equals sum(out * dout) over d_kv, which is shorter.
  Hidden positions need no mask: their weights are zero, and so is this.
  """
  dtype = weights.dtype
  weights, dweights, out, dout = (
    tf.cast(t, tf.float32) for t in (weights, dweights, out, dout)
  )
  total = tf.reduce_sum(out * dout, -1, keepdims=True)
  return tf.cast(scale * weights * (dweights - total), dtype)


def slice_functions(
  memory: str, d_kv: int
) -> tuple[Callable[..., tuple], Callable[..., tuple]]:
  """Returns attention and its gradient for one slice.

  Args:
    memory: the letters of k and v: "bmk", or "bmhk" with a head each.
    d_kv: numbers in one head.

  Letters: b batch, l length, m memory_length, h heads, k d_kv.
  """
  # float32, inside the softmax: bfloat16 would bend the scale itself.
  scale = d_kv**-0.5

  def attend(q, k, v, segments=None):
    scores = einsum(f"blhk,{memory}->blhm", q, k)
    weights = _causal_softmax(scores, tf.constant(scale), segments)
    return einsum(f"blhm,{memory}->blhk", weights, v), weights

  def attend_gradient(q, k, v, out, weights, dout):
    dv = einsum(f"blhm,blhk->{memory}", weights, dout)
    dweights = einsum(f"blhk,{memory}->blhm", dout, v)
    dscores = _causal_softmax_gradient(
      weights, dweights, out, dout, tf.constant(scale)
    )
    dq = einsum(f"blhm,{memory}->blhk", dscores, k)
    dk = einsum(f"blhm,blhk->{memory}", dscores, q)
    return dq, dk, dv

  return attend, attend_gradient


def causal_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  segments: mtf.Tensor | None = None,
) -> mtf.Tensor:
  """Attends from every position to itself and those before it.

  Args:
    q: [batch, length, heads, d_kv], activation dtype, already rotated.
    k: [batch, memory_length, d_kv] (multi-query), or
      [batch, memory_length, heads, d_kv] (multi-head).
    v: the shape of k.
    segments: [batch, length], int32; a position attends only to those that have
      its number. None is one segment a row.

  Returns:
    [batch, length, heads, d_kv], before the output projection. When `heads` is
    split, the gradients of a shared k and v are all-reduced over that axis.
  """
  batch, length, heads, d_kv = q.shape.dims
  memory_length = k.shape.dims[1]
  memory = "bmhk" if heads in k.shape.dims else "bmk"
  attend, attend_gradient = slice_functions(memory, d_kv.size)
  weights_shape = mtf.Shape([batch, length, heads, memory_length])
  splittable = ["batch", "heads"]

  def gradient(op, dout, _):
    q, k, v = op.inputs[:3]
    out, weights = op.outputs
    dq, dk, dv = WholeSlice(
      attend_gradient,
      [q, k, v, out, weights, dout],
      [(x.shape, x.dtype) for x in (q, k, v)],
      splittable=splittable,
      name="attention_gradient",
    ).outputs
    return [dq, dk, dv] if segments is None else [dq, dk, dv, None]

  return WholeSlice(
    attend,
    [q, k, v] if segments is None else [q, k, v, segments],
    [(q.shape, q.dtype), (weights_shape, q.dtype)],
    splittable=splittable,
    gradient=gradient,
    name="attention",
  ).outputs[0]
