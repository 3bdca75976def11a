# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""C++ operations for training steps, in `threads` threads of one CPU device."""

from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.architecture.block import PLAIN_ATTENTION, Attention, Mlp, Read
from palm_mtf.native.operations import operations, set_shapes


def reads(read: Read, shapes: Sequence[Sequence[int]]) -> bool:
  """Returns whether `read_product` supports the projections and MLP in `read`.

  `shapes` has the shape of one row of each product, such as [heads, d_kv].
  """
  for each, shape in zip(read.projections, shapes, strict=True):
    if each.vectors:
      return False
    if each.rotary and each.rotary[:2] != (shape[-1], "halves"):
      return False
  mixers = [branch.mixer for branch in read.joined]
  mlps = [x for x in mixers if isinstance(x, Mlp)]
  is_rotated = bool(read.projections[0].rotary)
  return mlps in ([], [Mlp("swish", is_gated=True)]) and (
    is_rotated or len(mlps) == len(mixers)
  )


def read_product(
  wide: tf.Tensor,
  sizes: Sequence[int],
  angles: Sequence[tf.Tensor],
  *,
  is_gated: bool,
  threads: int,
) -> list[tf.Tensor]:
  """Splits a joined product, rotates its q and k, and applies SwiGLU.

  Args:
    wide: product with joined kernels, [rows, columns], float32 or bfloat16.
    sizes: number of columns of each kernel.
    angles: sin and cos of rotary embedding, [length, d_kv / 2] float32 each.
    is_gated: whether the last two kernels are wi_gate and wi.

  Returns:
    One tensor [rows, size] per kernel, but one for the last two if `is_gated`.
  """
  read = sizes[:-1] if is_gated else sizes
  parts = operations().palm_read_product(
    wide=wide,
    angles=list(angles),
    num_parts=len(read),
    sizes=list(sizes),
    is_gated=is_gated,
    threads=threads,
  )
  for part, size in zip(parts, read, strict=True):
    part.set_shape([wide.shape[0], size])
  return parts


def read_product_gradient(
  wide: tf.Tensor,
  gradients: Sequence[tf.Tensor],
  sizes: Sequence[int],
  angles: Sequence[tf.Tensor],
  *,
  is_gated: bool,
  threads: int,
) -> tf.Tensor:
  """Returns `wide`'s gradient from `gradients` of `read_product`'s results."""
  gradient = operations().palm_read_product_gradient(
    wide=wide,
    gradients=list(gradients),
    angles=list(angles),
    sizes=list(sizes),
    is_gated=is_gated,
    threads=threads,
  )
  gradient.set_shape(wide.shape)
  return gradient


def norm(
  x: tf.Tensor,
  scale: tf.Tensor,
  *,
  is_centered: bool,
  epsilon: float,
  threads: int,
) -> tf.Tensor:
  """Normalizes each row of x, and multiplies it by `scale`.

  x and the result are [rows, d_model], float32 or bfloat16. `scale` is
  [d_model], float32. `is_centered` says whether the mean is subtracted first;
  `epsilon` is added to the mean square.
  """
  y = operations().palm_norm(
    x=x, scale=scale, is_centered=is_centered, epsilon=epsilon, threads=threads
  )
  y.set_shape(x.shape)
  return y


def norm_gradient(
  x: tf.Tensor,
  scale: tf.Tensor,
  dy: tf.Tensor,
  *,
  is_centered: bool,
  epsilon: float,
  threads: int,
) -> tuple[tf.Tensor, ...]:
  """Returns the gradients of x and scale, given `dy`, the result's gradient."""
  gradients = operations().palm_norm_gradient(
    x=x,
    scale=scale,
    dy=dy,
    is_centered=is_centered,
    epsilon=epsilon,
    threads=threads,
  )
  return tuple(set_shapes(gradients, (x, scale)))


def attends(mixer: Attention) -> bool:
  """Returns whether `attend` supports `mixer`: plain scores, no window."""
  return mixer == PLAIN_ATTENTION


def attend(
  q: tf.Tensor,
  k: tf.Tensor,
  v: tf.Tensor,
  masks: Sequence[tf.Tensor],
  *,
  threads: int,
) -> tf.Tensor:
  """Attends from each position to visible positions; keeps the shape of q.

  Args:
    q: [batch, length, heads, d_kv], float32 or bfloat16.
    k: [batch, length, key_heads, d_kv], where each key head serves an equal
      number of heads, or [batch, length, d_kv] if all share one key head.
    v: shape of k.
    masks: (), (segments,) or (segments, prefix), [batch, length] int32 each:
      the number of each position's document, and 1 for a position that all
      positions of its document see.
  """
  out = operations().palm_attention(
    q=q, k=k, v=v, masks=list(masks), threads=threads
  )
  out.set_shape(q.shape)
  return out


def attend_to_cache(
  qkv: Sequence[tf.Tensor],
  rows: tf.Tensor,
  positions: tf.Tensor,
  count: tf.Tensor,
  cache: Sequence[tf.Tensor],
  *,
  threads: int,
) -> tuple[tf.Tensor, ...]:
  """Attends from parts of texts to these texts so far, in a cache.

  Args:
    qkv: q, k and v as for `attend`, with batch 1: those of some tokens.
    rows, positions, count: see `read_parts` (generation/decode/forward.py).
    cache: keys and values of a layer, written in place.

  Returns:
    The bits of `attend` for the texts, in the shape of q, and the cache.
  """
  found = operations().palm_attend_to_cache(
    *(*qkv, rows, positions, count, *cache), threads=threads
  )
  return tuple(set_shapes(found, (qkv[0], *cache)))


def attend_gradient(
  q: tf.Tensor,
  k: tf.Tensor,
  v: tf.Tensor,
  out: tf.Tensor,
  dout: tf.Tensor,
  masks: Sequence[tf.Tensor],
  *,
  threads: int,
) -> tuple[tf.Tensor, ...]:
  """Returns gradients of q, k and v, given `attend`'s result and its gradient.

  The result is `out`, and its gradient is `dout`.
  """
  gradients = operations().palm_attention_gradient(
    q=q, k=k, v=v, out=out, dout=dout, masks=list(masks), threads=threads
  )
  return tuple(set_shapes(gradients, (q, k, v)))


def sum_logits(
  logits: tf.Tensor, targets: tf.Tensor, *, threads: int
) -> list[tf.Tensor]:
  """Returns the reductions over `vocab` that the cross-entropy needs.

  Args:
    logits: [rows, vocab], float32 or bfloat16.
    targets: [rows], int32; below 0 if the target is not in this slice of vocab.

  Returns:
    Three tensors, [rows] float32 each: the largest logit; the sum of
    exp(logits - largest); and the target's logit, 0 if the target is below 0.
  """
  sums = operations().palm_sum_logits(
    logits=logits, targets=targets, threads=threads
  )
  sums.set_shape([logits.shape[0], 3])
  return tf.unstack(sums, axis=1)
