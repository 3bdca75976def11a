# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention over one shared key and value head, or over one per head.

weights = softmax(q k / sqrt(d_kv), over visible memory_length)
out     = weights v

A position sees itself and the positions before it and, in a prefix LM, all of
the prefix.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.accounting.architecture import AttentionBlock, attention_blocks
from palm_mtf.native import layers as native
from palm_mtf.ops.matmul import einsum
from palm_mtf.ops.recompute import recompute, wait_for
from palm_mtf.ops.slicewise import ByDevice, WholeSlice
from palm_mtf.ops.xla import fused


def visible_softmax(
  scores: tf.Tensor, visible: tf.Tensor, scale: float | tf.Tensor
) -> tf.Tensor:
  """Returns softmax(scale * scores) over visible positions, dtype of scores.

  Args:
    scores: [..., memory_length], any float dtype.
    visible: bool, broadcasts to the scores; false makes the result 0.
    scale: 1 / sqrt(d_kv).
  """
  # The softmax and its scale are in float32, because bfloat16 rounds the scale.
  x = tf.cast(scores, tf.float32) * scale
  x = tf.where_v2(visible, x, x.dtype.min)
  x = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
  return tf.cast(x / tf.reduce_sum(x, -1, keepdims=True), scores.dtype)


@fused
def _masked_softmax(scores, scale, begin, segments=None, prefix=None):
  # scores: [batch, length, heads, memory_length]; the first query has position
  # `begin`. segments and prefix: [batch, memory_length].
  batch, length, _, memory_length = scores.shape
  position = begin + tf.range(length)[:, tf.newaxis, tf.newaxis]
  visible = tf.range(memory_length) <= position
  if prefix is not None:
    visible |= prefix[:, tf.newaxis, tf.newaxis] > 0
  if segments is not None:
    own = tf.slice(segments, [0, begin], [batch, length])
    own = own[:, :, tf.newaxis, tf.newaxis]
    visible &= tf.equal(own, segments[:, tf.newaxis, tf.newaxis])
  return visible_softmax(scores, visible, scale)


@fused
def _softmax_gradient(weights, dweights, out, dout, scale):
  dtype = weights.dtype
  weights, dweights, out, dout = (
    tf.cast(t, tf.float32) for t in (weights, dweights, out, dout)
  )
  # dscores = scale * weights * (dweights - sum(weights * dweights)). This sum
  # over memory_length equals sum(out * dout) over d_kv, which is shorter.
  # Masked positions need no mask here, because their weights are zero.
  total = tf.reduce_sum(out * dout, -1, keepdims=True)
  return tf.cast(scale * weights * (dweights - total), dtype)


@fused
def _sum_of_starts(*parts):
  # Adds up the gradients of the keys (or values) that each block of queries
  # reads, [batch, keys, ...]. Each part begins at position 0, and the last part
  # has all positions.
  last = parts[-1]
  total = tf.zeros(last.shape, tf.float32)
  for part in parts:
    behind = [0, last.shape[1] - part.shape[1]]
    padding = [[0, 0], behind, *([[0, 0]] * (len(last.shape) - 2))]
    total += tf.pad(tf.cast(part, tf.float32), padding)
  return tf.cast(total, last.dtype)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedAttention:
  """Attention of a device's slice, one block of queries after another."""

  # Blocks run one after another, so that memory holds only one block's scores.
  # XLA compiles only the element-wise operations between the matrix products,
  # because on CPUs oneDNN's products are faster than XLA's.

  blocks: Sequence[AttentionBlock]
  scale: float  # 1 / sqrt(d_kv)
  is_multi_head: bool  # whether each head has its own keys and values
  # Whether `attend` also returns the attention weights of each block, which
  # `gradient` then takes instead of masks.
  keeps_weights: bool

  @property
  def _memory(self) -> str:
    # The dimensions of k and v, for einsum. In multi-query attention all heads
    # read the same keys, so the heads are rows of one product, which needs no
    # transpose and no copies of k and v.
    return "bmhk" if self.is_multi_head else "bmk"

  def attend(
    self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *masks: tf.Tensor
  ) -> tf.Tensor | tuple[tf.Tensor, ...]:
    """Returns the output, in q's shape; if `keeps_weights`, also weights."""
    outs, weights = [], []
    for begin, own, keys, values, *some in self._blocks_with_keys(
      q, k, v, *masks
    ):
      if outs:
        own = wait_for(own, outs[-1])
      weights.append(self._compute_weights(begin, own, keys, *some))
      outs.append(einsum(f"blhm,{self._memory}->blhk", weights[-1], values))
    out = _join_blocks(outs)
    return (out, *weights) if self.keeps_weights else out

  def gradient(
    self,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    out: tf.Tensor,
    dout: tf.Tensor,
    *others: tf.Tensor,
  ) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns the gradients of q, k and v.

    Args:
      q: [batch, length, heads, d_kv].
      k: [batch, memory_length, d_kv] or [batch, memory_length, heads, d_kv].
      v: shape of k.
      out: result of `attend`, shape of q.
      dout: gradient of `out`.
      *others: if `keeps_weights`, the weights of each block; else the masks.
    """
    masks, kept = ((), others) if self.keeps_weights else (others, None)
    dq, dk, dv = [], [], []
    rows = zip(self._split_blocks(out), self._split_blocks(dout), strict=True)
    for (begin, own, keys, values, *some), (y, dy) in zip(
      self._blocks_with_keys(q, k, v, *masks), rows, strict=True
    ):
      if dk:
        own, dy = wait_for(own, dk[-1]), wait_for(dy, dk[-1])
      if kept:
        weights = kept[len(dk)]
      else:
        weights = self._compute_weights(begin, own, keys, *some)
      dv.append(einsum(f"blhm,blhk->{self._memory}", weights, dy))
      dweights = einsum(f"blhk,{self._memory}->blhm", dy, values)
      dscores = _softmax_gradient(
        weights, dweights, y, dy, tf.constant(self.scale)
      )
      dq.append(einsum(f"blhm,{self._memory}->blhk", dscores, keys))
      dk.append(einsum(f"blhm,blhk->{self._memory}", dscores, own))
    if len(dq) == 1:
      return *dq, *dk, *dv
    return _join_blocks(dq), _sum_of_starts(*dk), _sum_of_starts(*dv)

  def _compute_weights(self, begin, q, k, *masks):
    scores = einsum(f"blhk,{self._memory}->blhm", q, k)
    scale, begin = tf.constant(self.scale), tf.constant(begin)
    return _masked_softmax(scores, scale, begin, *masks)

  def _blocks_with_keys(self, q, *others) -> Iterator[list]:
    # Yields [first position, q, keys, values, *masks] of each block.
    for own, block in zip(self._split_blocks(q), self.blocks, strict=True):
      yield [block.begin, own, *_take_first(others, block.num_keys)]

  def _split_blocks(self, x: tf.Tensor) -> list[tf.Tensor]:
    if len(self.blocks) == 1:
      return [x]
    return tf.split(x, [each.end - each.begin for each in self.blocks], 1)


def _take_first(xs: Sequence[tf.Tensor], length: int) -> list[tf.Tensor]:
  """Returns the first `length` positions of xs [batch, memory_length, ...]."""
  # x[:, :length] would make four operations instead of one, for each of about
  # 100 slices per layer and device. Keys and values have equal shapes, so their
  # slices share the constants `begin` and `size`.
  constant = functools.cache(tf.constant)
  found = []
  for x in xs:
    batch, memory_length, *others = x.shape.as_list()
    if length < memory_length:
      begin, size = (0,) * x.shape.rank, (batch, length, *others)
      x = tf.slice(x, constant(begin), constant(size))
    found.append(x)
  return found


def _join_blocks(parts: list[tf.Tensor]) -> tf.Tensor:
  return parts[0] if len(parts) == 1 else tf.concat(parts, 1)


@dataclasses.dataclass(frozen=True)
class _Slice:
  """Attention of a slice by `blocked`, or by C++, which never keeps weights."""

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
  """Attends from each position to itself, earlier positions and the prefix.

  Args:
    q: [batch, length, heads, d_kv], activation dtype, rotated.
    k: [batch, memory_length, d_kv] (multi-query), or
      [batch, memory_length, heads, d_kv] (multi-head), rotated.
    v: shape of k.
    segments: [batch, length], int32: number of each position's document. A
      position attends only to its own document. None: one document per row.
    prefix: [batch, length], int32: 1 for a position that all positions of its
      document see, else 0. None means all 0. A prefix requires `segments`.
    keeps_weights: whether attention weights, length * memory_length numbers per
      head, are kept for the backward pass; otherwise the backward pass
      recomputes them, block by block. The C++ operations of CPUs never keep
      weights (native/self_attention.h).

  Returns:
    [batch, length, heads, d_kv], before the output projection.
  """
  batch, length, heads, d_kv = q.shape.dims
  blocks = attention_blocks(length.size, has_prefix=prefix is not None)
  masks = [x for x in (segments, prefix) if x is not None]
  blocked = BlockedAttention(
    blocks=blocks,
    scale=d_kv.size**-0.5,
    is_multi_head=heads in k.shape.dims,
    keeps_weights=keeps_weights,
  )
  of_slice = _Slice(blocked, len(masks))

  def gradient(op, dout, *_):
    # q, k, v and `out` wait for `dout`. Otherwise weights and blocks of `out`
    # would be computed earlier, and stay in memory until `dout` is computed.
    q, k, v, out = (recompute(x, dout) for x in (*op.inputs[:3], op.outputs[0]))
    # In multi-query attention dk and dv are sums over `heads`. If `heads` is
    # split, WholeSlice all-reduces these sums.
    dq, dk, dv = WholeSlice(
      ByDevice(of_slice.gradient, of_slice.gradient_native),
      [q, k, v, dout, *op.inputs[3:], out, *op.outputs[1:]],
      [(x.shape, x.dtype) for x in (q, k, v)],
      splittable=["batch", "heads"],
      name="attention_gradient",
    ).outputs
    return [dq, dk, dv, *(None for _ in masks)]

  def weights_shape(block: AttentionBlock) -> mtf.Shape:
    own = mtf.Dimension(f"length_{block.begin}", block.end - block.begin)
    keys = mtf.Dimension("memory_length", block.num_keys)
    return mtf.Shape([batch, own, heads, keys])

  kept = [weights_shape(block) for block in blocks] if keeps_weights else []
  return WholeSlice(
    ByDevice(blocked.attend, of_slice.attend_native),
    [q, k, v, *masks],
    [(shape, q.dtype) for shape in (q.shape, *kept)],
    splittable=["batch", "heads"],
    gradient=gradient,
    name="attention",
  ).outputs[0]
