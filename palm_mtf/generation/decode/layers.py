# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Arithmetic of one device between products with joined kernels."""

import functools
import math
from collections.abc import Sequence

from palm_mtf._tf import tf
from palm_mtf.generation.decode.matmul import largest_numbers, to_int8, value_of
from palm_mtf.model.attention import visible_softmax
from palm_mtf.model.layers import normalized
from palm_mtf.model.projection import read_product
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.xla import fused

# With one token a row, a step costs its products and the number of calls
# between them: each `fused` function is one call, and one pass over memory.


# --- Around products ---------------------------------------------------------


@fused
def read_inputs(wide, rows, shapes, dtype, angles, is_gated):
  """Reads `Rows` of a joined kernel as `read_product` does."""
  return read_product(value_of(wide, dtype), rows, shapes, angles, is_gated)


def _largest(xs):
  return functools.reduce(tf.maximum, [largest_numbers(x, 1) for x in xs])


@fused
def largest_of_rows(*xs):
  """Returns max |x| of each row over all parts, [rows, 1], float32."""
  return _largest(xs)


@fused
def quantize(xs, largest):
  """Quantizes parts [rows, columns] as one, with a scale for each row."""
  # Slices of one row share a scale: `largest` are of each, [rows, 1].
  largest = functools.reduce(tf.maximum, largest or [_largest(xs)])
  # Joined behind the rounding: int8 is a quarter of the bytes.
  numbers, scales = zip(*(to_int8(x, largest) for x in xs), strict=True)
  return tf.concat(numbers, 1), scales[0]


@fused
def dequantize(numbers, scale, dtype):
  """Returns quantized rows as one tensor of a float dtype."""
  return value_of((numbers, scale), dtype)


# --- A decoding step ---------------------------------------------------------


@fused
def add_and_norm(x, branch, scale, centered, quantizes):
  """Returns x + branch, [rows, d_model], and its norm; `branch` are `Rows`."""
  if branch:
    x += value_of(branch, x.dtype)
  y = tf.cast(normalized(x, centered)[0] * scale, x.dtype)
  return x, *(to_int8(y, largest_numbers(y, 1)) if quantizes else (y,))


@fused
def _softmax(scores, position, scale):
  at = tf.reshape(position, [-1, *[1] * (scores.shape.rank - 1)])
  visible = tf.range(scores.shape[-1]) <= at
  return visible_softmax(scores, visible, scale)


def attend_to_cache(
  q: tf.Tensor, keys: tf.Tensor, values: tf.Tensor, position: tf.Tensor
) -> tf.Tensor:
  """Attends from one token of each row to itself and those before it.

  Args:
    q: [rows, heads, d_kv].
    keys: [rows, (heads,) memory_length, d_kv].
    values: [rows, (heads,) memory_length, d_kv].
    position: [rows], int32: place of each token.

  Returns:
    [rows, heads * d_kv].
  """
  scale = q.shape[-1] ** -0.5
  # In multi-query attention all heads meet the same keys: they are the rows of
  # one product. A head with keys of its own makes a product of one row.
  if keys.shape.rank == 4:
    q = q[:, :, tf.newaxis]
  weights = _softmax(matmul(q, keys, transpose_b=True), position, scale)
  return tf.reshape(matmul(weights, values), [q.shape[0], -1])


def cache_rows(position: tf.Tensor, shape: Sequence[int]) -> tf.Tensor:
  """Returns the place of each token's rows in a flat cache.

  Args:
    position: [rows], int32: place of each token in its text.
    shape: shape of the cache, [rows, (heads,) memory_length, d_kv].

  Returns:
    [rows * heads], int32, in [0, rows * heads * memory_length).
  """
  *rows, memory_length, _ = shape
  first = memory_length * tf.reshape(tf.range(math.prod(rows)), rows)
  at = tf.reshape(position, [-1, *[1] * (len(rows) - 1)])
  return tf.reshape(first + at, [-1])


def written(cache: tf.Tensor, at: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
  """Writes one token of every row into a cache, in the same memory.

  Args:
    cache: [rows, (heads,) memory_length, d_kv].
    at: result of `cache_rows`.
    x: keys or values of the tokens, [rows, (heads,) d_kv].
  """
  d_kv = cache.shape[-1]
  # TensorFlow's scatter would copy all positions, which costs more than the
  # rest of a step. Nothing reads the cache of the step before any more, so
  # overwriting it is safe.
  flat = tf.raw_ops.InplaceUpdate(
    x=tf.reshape(cache, [-1, d_kv]), i=at, v=tf.reshape(x, [-1, d_kv])
  )
  return tf.reshape(flat, cache.shape)
