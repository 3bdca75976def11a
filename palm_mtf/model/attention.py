# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over one shared key and value head, or over one per head.

weights = softmax(q k / sqrt(d_kv), over visible memory_length)
out     = weights v

Visible are positions up to one's own; and, of a prefix LM, all of the prefix.
"""

import dataclasses

from palm_mtf._tf import mtf
from palm_mtf.config.attention_blocks import attention_blocks, num_keys
from palm_mtf.model.blocked_attention import BlockedAttention
from palm_mtf.native import attention as native
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import ByDevice, WholeSlice


@dataclasses.dataclass(frozen=True)
class _Slice:
  """Attention of a slice: block by block, or in C++, which keeps no weights."""

  blocked: BlockedAttention
  num_masks: int

  def attend_native(self, threads, q, k, v, *masks):
    return native.attend(q, k, v, masks, threads=threads)

  def gradient(self, q, k, v, dout, *others):
    masks, (out, *weights) = self._parts(others)
    given = weights if self.blocked.keeps_weights else masks
    return self.blocked.gradient(q, k, v, out, dout, *given)

  def gradient_native(self, threads, q, k, v, dout, *others):
    masks, _ = self._parts(others)
    return native.attend_gradient(q, k, v, dout, masks, threads=threads)

  def _parts(self, others):
    return others[: self.num_masks], others[self.num_masks :]


def self_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  segments: mtf.Tensor | None = None,
  prefix: mtf.Tensor | None = None,
  keeps_weights: bool = True,
) -> mtf.Tensor:
  """Attends from every position to itself, those before it and the prefix.

  Args:
    q: [batch, length, heads, d_kv], activation dtype, rotated.
    k: [batch, memory_length, d_kv] (multi-query), or
      [batch, memory_length, heads, d_kv] (multi-head), rotated.
    v: shape of k.
    segments: [batch, length], int32: document of each position, which attends
      to no other; None is one document a row.
    prefix: [batch, length], int32: 1 where a position is visible to all of its
      segment, else 0; None is 0. Only with segments.
    keeps_weights: whether the weights are kept for the backward pass, length *
      memory_length numbers a head; else it computes them again, block by block.
      CPUs with a C++ compiler never keep them (native/self_attention.h).

  Returns:
    [batch, length, heads, d_kv], before the output projection.
  """
  batch, length, heads, d_kv = q.shape.dims
  blocks = attention_blocks(length.size)
  has_prefix = prefix is not None
  masks = [x for x in (segments, prefix) if x is not None]
  blocked = BlockedAttention(
    blocks=blocks,
    has_prefix=has_prefix,
    scale=d_kv.size**-0.5,
    is_multi_head=heads in k.shape.dims,
    keeps_weights=keeps_weights,
  )
  of_slice = _Slice(blocked, len(masks))

  def gradient(op, dout, *_):
    # The weights of now are not those of the forward pass, and blocks of `out`
    # are not cut, and kept, before.
    q, k, v, out = (recompute(x, dout) for x in (*op.inputs[:3], op.outputs[0]))
    # Where `heads` is split, dk and dv of the shared head are sums over it:
    # WholeSlice all-reduces them.
    dq, dk, dv = WholeSlice(
      ByDevice(of_slice.gradient, of_slice.gradient_native),
      [q, k, v, dout, *op.inputs[3:], out, *op.outputs[1:]],
      [(x.shape, x.dtype) for x in (q, k, v)],
      splittable=["batch", "heads"],
      name="attention_gradient",
    ).outputs
    return [dq, dk, dv, *(None for _ in masks)]

  def weights_shape(begin: int, end: int) -> mtf.Shape:
    own = mtf.Dimension(f"length_{begin}", end - begin)
    keys = num_keys(end, length.size, has_prefix)
    return mtf.Shape([batch, own, heads, mtf.Dimension("memory_length", keys)])

  kept = [weights_shape(*block) for block in blocks] if keeps_weights else []
  return WholeSlice(
    ByDevice(blocked.attend, of_slice.attend_native),
    [q, k, v, *masks],
    [(shape, q.dtype) for shape in (q.shape, *kept)],
    splittable=["batch", "heads"],
    gradient=gradient,
    name="attention",
  ).outputs[0]
