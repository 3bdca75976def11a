# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over one shared key and value head, or over one per head.

weights = softmax(q k / sqrt(d_kv), over memory_length <= length)
out     = weights v
"""

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.bfloat16 import einsum
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused


def visible_softmax(
  scores: tf.Tensor, visible: tf.Tensor, scale: float | tf.Tensor
) -> tf.Tensor:
  """Returns the softmax of scale * scores [..., memory_length], masked.

  Args:
    scores: [..., memory_length], any float dtype, which the weights have too.
    visible: bool, broadcast to the scores; elsewhere weights are zero.
    scale: 1 / sqrt(d_kv).
  """
  # In float32, the scale too, which bfloat16 would bend.
  x = tf.cast(scores, tf.float32) * scale
  x = tf.where_v2(visible, x, x.dtype.min)
  x = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
  return tf.cast(x / tf.reduce_sum(x, -1, keepdims=True), scores.dtype)


@fused
def _causal_softmax(scores, scale, segments=None):
  # scores [batch, length, heads, memory_length], segments [batch, length]
  _, length, _, memory_length = scores.shape
  position = tf.range(length)[:, tf.newaxis, tf.newaxis]
  visible = tf.range(memory_length) <= position
  if segments is not None:
    segments = segments[:, :, tf.newaxis, tf.newaxis]
    visible &= tf.equal(segments, tf.transpose(segments, [0, 2, 3, 1]))
  return visible_softmax(scores, visible, scale)


@fused
def _causal_softmax_gradient(weights, dweights, out, dout, scale):
  dtype = weights.dtype
  weights, dweights, out, dout = (
    tf.cast(t, tf.float32) for t in (weights, dweights, out, dout)
  )
  # dscores = scale * weights * (dweights - sum(weights * dweights)); the sum
  # over memory_length equals that of out * dout over d_kv, which is shorter.
  # Hidden positions need no mask: their weights are zero, and so is this.
  total = tf.reduce_sum(out * dout, -1, keepdims=True)
  return tf.cast(scale * weights * (dweights - total), dtype)


def causal_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  segments: mtf.Tensor | None = None,
) -> mtf.Tensor:
  """Attends from every position to itself and those before it.

  Args:
    q: [batch, length, heads, d_kv], activation dtype, rotated.
    k: [batch, memory_length, d_kv] (multi-query), or
      [batch, memory_length, heads, d_kv] (multi-head), rotated.
    v: shape of k.
    segments: [batch, length], int32: document of each position, which attends
      to no other; None is one document a row.

  Returns:
    [batch, length, heads, d_kv], before the output projection.
  """
  batch, length, heads, d_kv = q.shape.dims
  memory_length = k.shape.dims[1]
  # Multi-query: `heads` fold into the rows of one product, because all of them
  # meet the same keys. No transpose, and no copy of k and v per head.
  memory = "bmhk" if heads in k.shape.dims else "bmk"
  scale = d_kv.size**-0.5

  # The products run apart from the element-wise pass between them: on CPUs,
  # oneDNN's are faster than those that XLA would fuse.
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

  def gradient(op, dout, _):
    q, k, v, *others = op.inputs
    out, weights = op.outputs
    # Where `heads` is split, dk and dv of the shared head are sums over it:
    # WholeSlice all-reduces them.
    dq, dk, dv = WholeSlice(
      attend_gradient,
      [q, k, v, out, weights, dout],
      [(x.shape, x.dtype) for x in (q, k, v)],
      splittable=["batch", "heads"],
      name="attention_gradient",
    ).outputs
    return [dq, dk, dv, *(None for _ in others)]

  weights_shape = mtf.Shape([batch, length, heads, memory_length])
  return WholeSlice(
    attend,
    [q, k, v] if segments is None else [q, k, v, segments],
    [(q.shape, q.dtype), (weights_shape, q.dtype)],
    splittable=["batch", "heads"],
    gradient=gradient,
    name="attention",
  ).outputs[0]
