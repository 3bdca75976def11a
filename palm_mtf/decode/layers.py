# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What one device does between the products of a decoding step.

Each function is one pass of XLA over its slice: decoder.py calls them, with the
products and the all-reduces in between.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.decode.matmul import largest_numbers, to_int8, value_of
from palm_mtf.model.attention import visible_softmax
from palm_mtf.model.layers import gated, normalized, turned
from palm_mtf.ops.bfloat16 import matmul
from palm_mtf.ops.xla import fused


@dataclasses.dataclass(frozen=True)
class Widths:
  """What one device's slice of a product is made of.

  Attributes:
    heads: number of query heads.
    d_kv: numbers in one head.
    is_shared: whether all heads have one key and one value.
    joins: whether heads and the MLP's hidden layer meet the same product.
    quantizes: whether a device alone can round the input of that product.
  """

  heads: int
  d_kv: int
  is_shared: bool
  joins: bool
  quantizes: bool

  def parts(self, wide: tf.Tensor) -> list[tf.Tensor]:
    """Splits [..., q k v wi_gate wi], or the first three of them."""
    kv = self.d_kv if self.is_shared else self.heads * self.d_kv
    sizes = [self.heads * self.d_kv, kv, kv]
    rest = wide.shape[-1] - sum(sizes)
    sizes += [rest // 2] * 2 if rest else []
    return tf.split(wide, sizes, -1)

  def for_products(self, *branches: tf.Tensor) -> list[tuple]:
    """Returns heads, and the hidden layer if given, as the products read them.

    Returns:
      The parts of each, see `parts_of`: of both joined, or of each alone.
    """
    whole = [tf.concat(branches, -1)] if self.joins else list(branches)
    return [_quantized(x) if self.quantizes else (x,) for x in whole]


def _quantized(x):
  return to_int8(x, largest_numbers(x, 1))


def _normed(x, scale, centered, quantizes):
  y = tf.cast(normalized(x, centered)[0] * scale, x.dtype)
  return _quantized(y) if quantizes else (y,)


@fused
def normed(x, scale, centered, quantizes):
  """Returns the norm of x [rows, d_model], its parts."""
  return _normed(x, scale, centered, quantizes)


@fused
def add_and_norm(x, out, scale, centered, quantizes):
  """Returns x + out and its norm, `out` and the norm in parts."""
  x += value_of(out, x.dtype)
  return x, _normed(x, scale, centered, quantizes)


@fused
def largest_of_rows(x):
  """Returns max |x| of each row, [rows, 1], float32."""
  return largest_numbers(x, 1)


@fused
def quantized(x, *largest):
  """Returns the parts of x with one scale for the largest of several."""
  return to_int8(x, functools.reduce(tf.maximum, largest))


@fused
def split_swiglu(wide, dtype, widths):
  """Returns the MLP's hidden layer of [rows, wi_gate wi], for the product."""
  (hidden,) = widths.for_products(
    gated(*tf.split(value_of(wide, dtype), 2, -1))
  )
  return hidden


@fused
def attention_parts(wide, shape, dtype, sin, cos, widths):
  """Returns q, k and v, turned, and the MLP's hidden layer if it is there.

  `wide` has the parts of [tokens, q k v ...], and `shape` says what the tokens
  are: [batch, length] of prompts, [batch] of one step; sin and cos are [the
  last of `shape`, d_kv / 2]. k and v have `heads` in multi-head.
  """
  wide = tf.reshape(value_of(wide, dtype), [*shape, -1])
  q, k, v, *mlp = widths.parts(wide)
  shape = [*shape, -1, widths.d_kv]
  sin, cos = sin[:, tf.newaxis], cos[:, tf.newaxis]
  q, k, v = (tf.reshape(each, shape) for each in (q, k, v))
  q, k = turned(q, sin, cos), turned(k, sin, cos)
  if widths.is_shared:
    k, v = k[..., 0, :], v[..., 0, :]
  return (q, k, v, gated(*mlp)) if mlp else (q, k, v)


@fused
def _softmax(scores, position, scale):
  """Returns the weights of the places up to each row's own."""
  at = tf.reshape(position, [-1, *[1] * (scores.shape.rank - 1)])
  visible = tf.range(scores.shape[-1]) <= at
  return visible_softmax(scores, visible, scale)


def attend_to_cache(
  q: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, position: tf.Tensor
) -> tf.Tensor:
  """Returns what one token of each row makes of itself and those before it.

  Args:
    q: [rows, heads, d_kv].
    keys: [rows, (heads,) memory_length, d_kv].
    values: [rows, (heads,) memory_length, d_kv].
    position: [rows], int32: the place of each token.

  Returns:
    [rows, heads, (1,) d_kv].
  """
  scale = q.shape[-1] ** -0.5
  if keys.shape.rank == 4:
    q = q[:, :, tf.newaxis]
  weights = _softmax(matmul(q, keys, transpose_b=True), position, scale)
  return matmul(weights, values)


@fused
def for_products(rows, widths, *branches):
  """Returns what the next products read of `rows` tokens, in parts.

  `branches` are what the heads make, and the hidden layer if it is there.
  """
  return widths.for_products(*(tf.reshape(x, [rows, -1]) for x in branches))


def rows_of_cache(position: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
  """Returns which rows of a flat cache are of one place: [rows (heads)].

  Args:
    position: [rows], int32.
    shape: shape of the cache, [rows, (heads,) memory_length, d_kv].
  """
  *rows, memory_length, _ = shape
  first = memory_length * tf.reshape(tf.range(math.prod(rows)), rows)
  at = tf.reshape(position, [-1, *[1] * (len(rows) - 1)])
  return tf.reshape(first + at, [-1])


def written(cache: tf.Tensor, at: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """Returns a cache with one more token of every row, in the same memory.

  What was read before is of no use afterwards: a copy of all positions, which
  is what TensorFlow's scatter makes, would cost more than the rest of a step.

  Args:
    cache: keys or values of one layer, [rows, (heads,) memory_length, d_kv].
    at: places that `rows_of_cache` returned.
    x: the token's, [rows, (heads,) d_kv].
  """
  d_kv = cache.shape[-1]
  flat = tf.raw_ops.InplaceUpdate(
    x=tf.reshape(cache, [-1, d_kv]), i=at, v=tf.reshape(x, [-1, d_kv])
  )
  return tf.reshape(flat, cache.shape)
