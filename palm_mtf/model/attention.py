# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Causal attention over one shared key and value head, or over one per head.

weights = softmax(q k / sqrt(d_kv), over memory_length <= length)
out     = weights v
"""

from palm_mtf._tf import mtf
from palm_mtf.config.attention_blocks import attention_blocks
from palm_mtf.model.blocked_attention import BlockedAttention
from palm_mtf.model.remat import after
from palm_mtf.ops.slicewise import WholeSlice


def causal_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  segments: mtf.Tensor | None = None,
  keeps_weights: bool = True,
) -> mtf.Tensor:
  """Attends from every position to itself and those before it.

  Args:
    q: [batch, length, heads, d_kv], activation dtype, rotated.
    k: [batch, memory_length, d_kv] (multi-query), or
      [batch, memory_length, heads, d_kv] (multi-head), rotated.
    v: shape of k.
    segments: [batch, length], int32: document of each position, which attends
      to no other; None is one document a row.
    keeps_weights: whether the weights are kept for the backward pass, length *
      memory_length numbers a head; else it computes them again, block by block.

  Returns:
    [batch, length, heads, d_kv], before the output projection.
  """
  batch, length, heads, d_kv = q.shape.dims
  blocks = attention_blocks(length.size)
  attention = BlockedAttention(
    blocks=blocks,
    scale=d_kv.size**-0.5,
    is_multi_head=heads in k.shape.dims,
    keeps_weights=keeps_weights,
  )

  def gradient(op, dout, *_):
    q, k, v, *segments = op.inputs
    out, *weights = op.outputs
    if not keeps_weights:
      q = after(q, dout)  # the weights of now are not those of the forward pass
    # Where `heads` is split, dk and dv of the shared head are sums over it:
    # WholeSlice all-reduces them.
    dq, dk, dv = WholeSlice(
      attention.gradient,
      [q, k, v, out, dout, *(weights if keeps_weights else segments)],
      [(x.shape, x.dtype) for x in (q, k, v)],
      splittable=["batch", "heads"],
      name="attention_gradient",
    ).outputs
    return [dq, dk, dv, *(None for _ in segments)]

  def weights_shape(begin: int, end: int) -> mtf.Shape:
    own = mtf.Dimension(f"length_{begin}", end - begin)
    return mtf.Shape([batch, own, heads, mtf.Dimension("memory_length", end)])

  kept = [weights_shape(*block) for block in blocks] if keeps_weights else []
  return WholeSlice(
    attention.attend,
    [q, k, v] if segments is None else [q, k, v, segments],
    [(shape, q.dtype) for shape in (q.shape, *kept)],
    splittable=["batch", "heads"],
    gradient=gradient,
    name="attention",
  ).outputs[0]
