# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Attention; several query heads may share one head of keys and values.

weights = softmax(scale * q k + score(positions), over visible positions)
out     = weights v
scale   = 1 / sqrt(d_kv), or SCORE_SCALE

A position sees itself, earlier positions (with a window, only the last of
these), and in a prefix LM the whole prefix.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.attention_blocks import (
  AttentionBlock,
  attention_blocks,
)
from palm_mtf.architecture.block import PLAIN_ATTENTION, Attention
from palm_mtf.model.positions import score_by_distance
from palm_mtf.native import layers as native
from palm_mtf.ops.matmul import einsum
from palm_mtf.ops.recompute import recompute, wait_for
from palm_mtf.ops.slicewise import ByDevice, WholeSlice
from palm_mtf.ops.xla import fused


def visible_softmax(
  scores: tf.Tensor,
  visible: tf.Tensor,
  scale: float | tf.Tensor,
  *bias: tf.Tensor,
) -> tf.Tensor:
  """Returns softmax(scale * scores + bias) over visible positions.

  Args:
    scores: [..., memory_length], any float dtype, also that of the result.
    visible: bool, broadcasts to the scores; false makes the result 0.
    scale: factor of the scores, such as 1 / sqrt(d_kv).
    *bias: nothing, or a float32 tensor that broadcasts to the scores.
  """
  # The softmax and its scale are in float32, because bfloat16 rounds the scale.
  x = tf.cast(scores, tf.float32) * scale
  for each in bias:
    x += each
  x = tf.where_v2(visible, x, x.dtype.min)
  x = tf.exp(x - tf.reduce_max(x, -1, keepdims=True))
  return tf.cast(x / tf.reduce_sum(x, -1, keepdims=True), scores.dtype)


@fused
def _masked_softmax(scores, scale, begin, window, masks, bias):
  # Returns the attention weights, in the shape of `scores`: [batch, length,
  # heads, memory_length]. `begin` is the position of the first query. `masks`
  # is [], [segments] or [segments, prefix], [batch, memory_length] each.
  batch, length, _, memory_length = scores.shape
  position = begin + tf.range(length)[:, tf.newaxis, tf.newaxis]
  key = tf.range(memory_length)
  visible = key <= position
  if window is not None:
    visible &= key > position - window
  segments, *prefix = masks or [None]
  for each in prefix:
    visible |= each[:, tf.newaxis, tf.newaxis] > 0
  if segments is not None:
    own = tf.slice(segments, [0, begin], [batch, length])
    own = own[:, :, tf.newaxis, tf.newaxis]
    visible &= tf.equal(own, segments[:, tf.newaxis, tf.newaxis])
  return visible_softmax(scores, visible, scale, *bias)


@fused
def _softmax_gradient(weights, dweights, out, dout, scale):
  # Returns the gradients of x and bias in softmax(scale x + bias), x = q k^T.
  dtype = weights.dtype
  weights, dweights, out, dout = (
    tf.cast(t, tf.float32) for t in (weights, dweights, out, dout)
  )
  # dbias = weights * (dweights - sum(weights * dweights)). This sum over
  # memory_length equals sum(out * dout) over d_kv, which is shorter. Masked
  # positions need no mask here, because their weights are zero.
  total = tf.reduce_sum(out * dout, -1, keepdims=True)
  dbias = weights * (dweights - total)
  return tf.cast(scale * dbias, dtype), dbias


@fused
def _sum_of_parts(parts, places):
  # Returns the gradient of all keys (or values), [batch, memory_length, ...].
  # `parts` has one gradient per block of queries, for only the keys that the
  # block reads; `places` counts the keys before and after these keys.
  total = 0.0
  for part, (before, after) in zip(parts, places, strict=True):
    padding = [[0, 0], [before, after], *([[0, 0]] * (len(part.shape) - 2))]
    total += tf.pad(tf.cast(part, tf.float32), padding)
  return tf.cast(total, parts[0].dtype)


class Heads:
  """The matrix products of attention; query heads may share keys and values."""

  # In multi-query attention all heads read the same keys. The queries of all
  # heads are therefore rows of one product, which needs no transpose and no
  # copies of k and v. In grouped-query attention each group has such a product.

  def __init__(self, num_heads: int, memory: Sequence[int]):
    # `memory` is the shape of k, [batch, memory_length, (key_heads,) d_kv].
    *_, key_heads, _ = memory
    self._group = None
    self._q, self._memory, self._scores = "blhk", "bmhk", "blhm"
    if len(memory) == 3:
      self._memory = "bmk"
    elif key_heads < num_heads:
      self._group = [key_heads, num_heads // key_heads]
      self._q, self._memory, self._scores = "blngk", "bmnk", "blngm"

  def scores(self, q, k):
    """Returns q k^T, [batch, length, heads, memory_length]."""
    equation = f"{self._q},{self._memory}->{self._scores}"
    return self._join(einsum(equation, self._split(q), k))

  def outputs(self, weights, v):
    """Returns weights v, [batch, length, heads, d_kv]."""
    equation = f"{self._scores},{self._memory}->{self._q}"
    return self._join(einsum(equation, self._split(weights), v))

  def to_memory(self, weights, x):
    """Returns weights^T x, in the shape of k: the gradient of k or v."""
    equation = f"{self._scores},{self._q}->{self._memory}"
    return einsum(equation, self._split(weights), self._split(x))

  def _split(self, x):
    if not self._group:
      return x
    batch, length, _, last = x.shape
    return tf.reshape(x, [batch, length, *self._group, last])

  def _join(self, x):
    if not self._group:
      return x
    batch, length, *_, last = x.shape
    return tf.reshape(x, [batch, length, -1, last])


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockedAttention:
  """Attention on a device's slice, one block of queries after another."""

  # Blocks run one after another, so that memory holds only one block's scores.
  # XLA compiles only the element-wise operations between the matrix products,
  # because on CPUs oneDNN's products are faster than XLA's.

  blocks: Sequence[AttentionBlock]
  scale: float  # factor of the products of q and k
  # Whether `attend` also returns the attention weights of each block, for
  # `gradient`. If not, `gradient` computes them again, to save memory.
  keeps_weights: bool
  num_masks: int = 0
  window: int | None = None
  # POSITIONS if it makes scores depend on distances, such as "t5"; else None.
  score_positions: str | None = None

  def attend(
    self, q: tf.Tensor, k: tf.Tensor, v: tf.Tensor, *others: tf.Tensor
  ) -> tf.Tensor | tuple[tf.Tensor, ...]:
    """Returns the output, shape of q; if `keeps_weights`, also the weights.

    `others` has the masks, if any: segments, then prefix. The `extras` follow:
    tensors by which distances change scores, such as ALiBi's slopes.
    """
    heads, extras = Heads(q.shape[2], k.shape), others[self.num_masks :]
    outs, weights = [], []
    for block, own, keys, values, *masks in self._blocks_with_keys(
      q, k, v, *others[: self.num_masks]
    ):
      if outs:
        own = wait_for(own, outs[-1])
      weights.append(
        self._compute_weights(heads, block, own, keys, masks, extras)
      )
      outs.append(heads.outputs(weights[-1], values))
    out = _join_blocks(outs)
    return (out, *weights) if self.keeps_weights else out

  def gradient(
    self,
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    dout: tf.Tensor,
    *others: tf.Tensor,
  ) -> tuple[tf.Tensor, ...]:
    """Returns the gradients of q, k, v and each of `extras` (see `attend`).

    Args:
      q: [batch, length, heads, d_kv].
      k, v: [batch, memory_length, d_kv] or [batch, memory_length, key_heads,
        d_kv].
      dout: gradient of the result of `attend`, shape of q.
      *others: `others` of `attend`; then what `attend` returned: the output
        and, if `keeps_weights`, the attention weights of each block.
    """
    heads = Heads(q.shape[2], k.shape)
    num_results = 1 + (len(self.blocks) if self.keeps_weights else 0)
    end = len(others) - num_results
    masks, extras = others[: self.num_masks], others[self.num_masks : end]
    out, *kept = others[end:]
    dq, dk, dv, dextras = [], [], [], []
    rows = zip(self._split_blocks(out), self._split_blocks(dout), strict=True)
    for (block, own, keys, values, *some), (y, dy) in zip(
      self._blocks_with_keys(q, k, v, *masks), rows, strict=True
    ):
      if dk:
        own, dy = wait_for(own, dk[-1]), wait_for(dy, dk[-1])
      if kept:
        weights = kept[len(dk)]
      else:
        weights = self._compute_weights(heads, block, own, keys, some, extras)
      dv.append(heads.to_memory(weights, dy))
      dscores, dbias = _softmax_gradient(
        weights, heads.scores(dy, values), y, dy, tf.constant(self.scale)
      )
      seen, *bias = self._score_by_distance(block, own, extras)
      down = heads.outputs(dscores, keys)
      dk.append(heads.to_memory(dscores, seen))
      if bias:
        if bias[0].shape[0] == 1:  # one bias for all sequences of the batch
          dbias = tf.reduce_sum(dbias, 0, keepdims=True)
        xs = [own, *extras]
        # If Mesh TensorFlow recomputes a layer, q also depends on the extras
        # through the rest of the model. Stop at `xs`, so that tf.gradients
        # differentiates only `score_by_distance`.
        down, *found = tf.gradients(
          [seen, *bias], xs, [down, dbias], stop_gradients=xs
        )
        dextras.append(found)
      dq.append(down)
    dextras = [tf.add_n(each) for each in zip(*dextras, strict=True)]
    if len(dq) == 1:
      return *dq, *dk, *dv, *dextras
    length = k.shape[1]
    places = [(x.first_key, length - x.end_key) for x in self.blocks]
    return (
      _join_blocks(dq),
      _sum_of_parts(dk, places),
      _sum_of_parts(dv, places),
      *dextras,
    )

  def _score_by_distance(self, block, q, extras):
    if self.score_positions is None:
      return [q]
    at = tf.range(block.begin, block.end)[:, tf.newaxis]
    distance = (at - tf.range(block.first_key, block.end_key))[tf.newaxis]
    return score_by_distance(
      self.score_positions, q, distance, self.scale, extras
    )

  def _compute_weights(self, heads, block, q, k, masks, extras):
    q, *bias = self._score_by_distance(block, q, extras)
    scale = tf.constant(self.scale)
    begin = tf.constant(block.begin - block.first_key)
    return _masked_softmax(
      heads.scores(q, k), scale, begin, self.window, list(masks), bias
    )

  def _blocks_with_keys(self, q, *others) -> Iterator[list]:
    # Yields [block, q, keys, values, *masks] for each block.
    for own, block in zip(self._split_blocks(q), self.blocks, strict=True):
      yield [block, own, *_cut_to_keys(others, block)]

  def _split_blocks(self, x: tf.Tensor) -> list[tf.Tensor]:
    if len(self.blocks) == 1:
      return [x]
    return tf.split(x, [each.end - each.begin for each in self.blocks], 1)


def _cut_to_keys(
  xs: Sequence[tf.Tensor], block: AttentionBlock
) -> list[tf.Tensor]:
  """Cuts each x [batch, memory_length, ...] to the keys that a block reads."""
  # x[:, first:end] would make four operations instead of one, for each of about
  # 100 slices per layer and device. Keys and values have equal shapes, so their
  # slices share the constants `begin` and `size`.
  constant = functools.cache(tf.constant)
  found = []
  for x in xs:
    batch, memory_length, *others = x.shape.as_list()
    if block.num_keys < memory_length:
      begin = (0, block.first_key, *(0 for _ in others))
      size = (batch, block.num_keys, *others)
      x = tf.slice(x, constant(begin), constant(size))
    found.append(x)
  return found


def _join_blocks(parts: list[tf.Tensor]) -> tf.Tensor:
  return parts[0] if len(parts) == 1 else tf.concat(parts, 1)


def _attend_native(threads, q, k, v, *masks):
  return native.attend(q, k, v, masks, threads=threads)


def self_attention(
  q: mtf.Tensor,
  k: mtf.Tensor,
  v: mtf.Tensor,
  segments: mtf.Tensor | None = None,
  prefix: mtf.Tensor | None = None,
  *,
  mixer: Attention = PLAIN_ATTENTION,
  extras: Sequence[mtf.Tensor] = (),
  keeps_weights: bool = True,
) -> mtf.Tensor:
  """Attends from each position to itself, earlier positions and the prefix.

  Args:
    q: [batch, length, heads, d_kv], activation dtype, rotated.
    k, v: [batch, memory_length, d_kv] (multi-query), or [batch, memory_length,
      key_heads, d_kv]; k is rotated.
    segments: [batch, length], int32: number of each position's document. A
      position attends only to its own document. None: one document per row.
    prefix: [batch, length], int32: 1 for a position that all positions of its
      document see, else 0. None means all 0. A prefix requires `segments`.
    mixer: how distances change scores, the window and the scale.
    extras: tensors for `score_by_distance`, such as ALiBi's slopes.
    keeps_weights: whether to keep the attention weights, length * memory_length
      numbers per head; otherwise the backward pass recomputes them, block by
      block. The C++ operations never keep them (native/self_attention.h).

  Returns:
    [batch, length, heads, d_kv], before the output projection.
  """
  batch, length, heads, d_kv = q.shape.dims
  blocks = attention_blocks(length.size, prefix is not None, mixer.window)
  masks = [x for x in (segments, prefix) if x is not None]
  n = len(masks)
  blocked = BlockedAttention(
    blocks=blocks,
    scale=mixer.factor(d_kv.size),
    keeps_weights=keeps_weights,
    num_masks=n,
    window=mixer.window,
    score_positions=mixer.score_positions,
  )

  def gradient_native(threads, q, k, v, dout, *others):
    masks, out = others[:n], others[n]  # `native.attends` allows no extras
    return native.attend_gradient(q, k, v, out, dout, masks, threads=threads)

  is_native = native.attends(mixer)

  def gradient(op, dout, *_):
    # Read q, k, v and `out` only after `dout`. Otherwise TensorFlow could start
    # the gradient's operations in the forward pass, and keep their results.
    q, k, v, out = (recompute(x, dout) for x in (*op.inputs[:3], op.outputs[0]))
    extras = op.inputs[3 + n :]
    # In multi-query attention dk and dv are sums over `heads`. If `heads` is
    # split, WholeSlice all-reduces these sums.
    found = WholeSlice(
      ByDevice(blocked.gradient, gradient_native if is_native else None),
      [q, k, v, dout, *op.inputs[3:], out, *op.outputs[1:]],
      [(x.shape, x.dtype) for x in (q, k, v, *extras)],
      splittable=["batch", "heads"],
      name="attention_gradient",
    ).outputs
    return [*found[:3], *(None for _ in masks), *found[3:]]

  results = [q.shape]
  for x in blocks if keeps_weights else ():
    queries = mtf.Dimension(f"length_{x.begin}", x.end - x.begin)
    keys = mtf.Dimension("memory_length", x.num_keys)
    results.append(mtf.Shape([batch, queries, heads, keys]))
  return WholeSlice(
    ByDevice(blocked.attend, _attend_native if is_native else None),
    [q, k, v, *masks, *extras],
    [(shape, q.dtype) for shape in results],
    splittable=["batch", "heads"],
    gradient=gradient,
    name="attention",
  ).outputs[0]
