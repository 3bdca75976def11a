# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What one device does between the products of a decoding step.

Each function is one pass of XLA over its slice: decode.py calls them, with the
products and the all-reduces in between.
"""

import dataclasses
import functools

from palm_mtf._tf import fused, tf
from palm_mtf.model.layers import gated, normalized, turned
from palm_mtf.model.products import largest_numbers, to_int8, value_of


@dataclasses.dataclass(frozen=True)
class Widths:
  """What one device's slice of a product is made of.

  Attributes:
    heads: of the queries.
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
def prompt_parts(wide, shape, dtype, sin, cos, widths):
  """Returns q, k and v, turned, and the MLP's hidden layer if it is there.

  `wide` has the parts of [batch * length, q k v ...], `shape` is [batch,
  length]; k and v have `heads` in multi-head.
  """
  wide = tf.reshape(value_of(wide, dtype), [*shape, -1])
  q, k, v, *mlp = widths.parts(wide)
  shape = [*shape, -1, widths.d_kv]
  sin, cos = sin[:, tf.newaxis], cos[:, tf.newaxis]
  q, k, v = (tf.reshape(each, shape) for each in (q, k, v))
  q, k = turned(q, sin, cos), turned(k, sin, cos)
  if widths.is_shared:
    k, v = k[:, :, 0], v[:, :, 0]
  return (q, k, v, gated(*mlp)) if mlp else (q, k, v)


@fused
def attend_to_cache(wide, keys, values, position, sin, cos, widths):
  """Returns what one token of each row makes of the tokens before it.

  Args:
    wide: the parts of [rows, q k v ...].
    keys: of one layer, before this token.
    values: the same.
    position: [rows], int32: how many tokens there are before.
    sin: [rows, d_kv / 2], float32, of the position.
    cos: the same.
    widths: static.

  Returns:
    What the next products read, in parts, and the new key and value,
    [rows, (heads,) d_kv].
  """
  wide = value_of(wide, keys.dtype)
  q, k, v, *mlp = widths.parts(wide)
  shape = [wide.shape[0], -1, widths.d_kv]
  q, k, v = (tf.reshape(each, shape) for each in (q, k, v))
  sin, cos = sin[:, tf.newaxis], cos[:, tf.newaxis]
  q, k = turned(q, sin, cos), turned(k, sin, cos)
  memory = "bmk" if widths.is_shared else "bhmk"
  # float32: the sums of the softmax, and the weights that bfloat16 would bend.
  q_, k_, v_, keys, values = (
    tf.cast(each, tf.float32) for each in (q, k, v, keys, values)
  )
  q_ *= widths.d_kv**-0.5
  before = tf.einsum(f"bhk,{memory}->bhm", q_, keys)
  own = tf.reduce_sum(q_ * k_, -1, keepdims=True)  # broadcast over heads
  memory_length = keys.shape[-2]
  visible = tf.range(memory_length) < position[:, tf.newaxis, tf.newaxis]
  before = tf.where_v2(visible, before, before.dtype.min)
  top = tf.maximum(tf.reduce_max(before, -1, keepdims=True), own)
  before, own = tf.exp(before - top), tf.exp(own - top)
  out = tf.einsum(f"bhm,{memory}->bhk", before, values) + own * v_
  out /= tf.reduce_sum(before, -1, keepdims=True) + own
  out = tf.reshape(tf.cast(out, wide.dtype), [wide.shape[0], -1])
  if widths.is_shared:
    k, v = k[:, 0], v[:, 0]
  branches = [out, gated(*mlp)] if mlp else [out]
  return widths.for_products(*branches), k, v


def places(position: tf.Tensor, shape: tf.TensorShape) -> tf.Tensor:
  """Returns where in a cache each row's token goes: [rows, (heads,) rank]."""
  rows, *heads, _, _ = shape
  row = tf.range(rows)
  if not heads:
    return tf.stack([row, position], -1)
  grid = tf.meshgrid(row, tf.range(heads[0]), indexing="ij")
  at = tf.broadcast_to(position[:, tf.newaxis], [rows, heads[0]])
  return tf.stack([*grid, at], -1)
