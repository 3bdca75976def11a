# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Embedding, norm, rotary embedding and SwiGLU, with their gradients."""

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.native import layers as native
from palm_mtf.native.operations import IS_CENTERED
from palm_mtf.ops.slicewise import ByDevice, WholeSlice
from palm_mtf.ops.xla import fused

# Each layer below makes one pass over the memory of a device's slice. The layer
# computes in float32 for any activation dtype, and rounds only its result.

NORM_EPSILON = 1e-6
ROTARY_BASE = 10_000.0


def local_rows(first: tf.Tensor, tokens: tf.Tensor, rows: int) -> tf.Tensor:
  """Returns each token's row in one slice of `vocab`; -1 if not in the slice.

  Args:
    first: [], int32, token of the slice's first row.
    tokens: [...], int32.
    rows: number of rows in the slice.
  """
  row = tokens - first
  # -1, because unsorted_segment_sum ignores segment -1.
  return tf.where_v2((row >= 0) & (row < rows), row, -1)


def local_embedding(
  first: tf.Tensor, table: tf.Tensor, tokens: tf.Tensor
) -> tf.Tensor:
  """Looks up tokens in one slice of the table, [rows, d_model].

  Tokens that are not in the slice give zeros; for arguments see `local_rows`.
  """
  row = local_rows(first, tokens, table.shape[0])
  found = tf.gather(table, tf.maximum(row, 0))
  return tf.where_v2((row >= 0)[..., tf.newaxis], found, tf.zeros_like(found))


def _embed_gradient(first, rows, tokens, dy):
  (num_rows,) = rows.shape
  row = local_rows(first, tokens, num_rows)
  # Sums are in float32, because a frequent token's sum has thousands of terms.
  return tf.math.unsorted_segment_sum(tf.cast(dy, tf.float32), row, num_rows)


def embed(
  table: mtf.Tensor, tokens: mtf.Tensor, gradient_dtype: tf.DType | None = None
) -> mtf.Tensor:
  """Looks up each token's row of the table; returns [batch, length, d_model].

  Args:
    table: [vocab, d_model], activation dtype.
    tokens: [batch, length], int32 in [0, vocab).
    gradient_dtype: dtype in which devices add up the table's gradient; None is
      the dtype of the table.
  """
  vocab, d_model = table.shape.dims
  gradient_dtype = gradient_dtype or table.dtype

  def gradient(op, dy):
    table, tokens = op.inputs
    # The gradient needs only the number of rows, so the table is not kept.
    rows = mtf.zeros(dy.mesh, mtf.Shape([vocab]), tf.int32)
    return [
      WholeSlice(
        lambda *inputs: tf.cast(_embed_gradient(*inputs), gradient_dtype),
        [rows, tokens, dy],
        [(table.shape, gradient_dtype)],
        splittable=["batch", "vocab"],
        offset_of=vocab,
        name="embed_gradient",
      ).outputs[0],
      None,
    ]

  # If `vocab` is split, each slice looks up only its own tokens, and an
  # all-reduce sums the outputs, which are zeros for all other tokens.
  return WholeSlice(
    local_embedding,
    [table, tokens],
    [(tokens.shape + d_model, table.dtype)],
    splittable=["batch", "vocab"],
    gradient=gradient,
    offset_of=vocab,
    name="embed",
  ).outputs[0]


# Each norm takes x [..., d_model] in float32. It returns the normalized y and,
# for the norm's gradient, 1 / deviation, [..., 1].


def _rms_norm(x):
  rsqrt = tf.math.rsqrt(
    tf.reduce_mean(tf.square(x), -1, keepdims=True) + NORM_EPSILON
  )
  return x * rsqrt, rsqrt


def _layer_norm(x):
  return _rms_norm(x - tf.reduce_mean(x, -1, keepdims=True))


# The gradient of x is orthogonal to y and, if the norm subtracts the mean, to
# the vector of ones.


def _rms_norm_gradient(y, rsqrt, dy):
  return (dy - y * tf.reduce_mean(dy * y, -1, keepdims=True)) * rsqrt


def _layer_norm_gradient(y, rsqrt, dy):
  dx = dy - y * tf.reduce_mean(dy * y, -1, keepdims=True)
  return (dx - tf.reduce_mean(dy, -1, keepdims=True)) * rsqrt


# The norm and its gradient for each value of NORM. Norms in IS_CENTERED are
# also operations in C++.
_NORMS = {
  "layer_norm": (_layer_norm, _layer_norm_gradient),
  "rms_norm": (_rms_norm, _rms_norm_gradient),
}


def normalize(x: tf.Tensor, kind: str) -> tf.Tensor:
  """Normalizes x without a scale; returns [..., d_model], float32.

  Args:
    x: [..., d_model], any float dtype.
    kind: value of NORM, "layer_norm" or "rms_norm".
  """
  forward, _ = _NORMS[kind]
  return forward(tf.cast(x, tf.float32))[0]


@fused
def _norm(x, scale, kind):
  return tf.cast(normalize(x, kind) * scale, x.dtype)


def _to_rows(x):
  return tf.reshape(x, [-1, x.shape[-1]])


@fused
def _norm_gradient(x, scale, dy, kind):
  forward, backward = _NORMS[kind]
  shape, dtype = x.shape, x.dtype
  # x and dy become matrices, because on CPUs XLA's sums over two dimensions
  # take twice as long as sums over one dimension.
  x, dy = _to_rows(x), _to_rows(dy)
  y, state = forward(tf.cast(x, tf.float32))
  dy = tf.cast(dy, tf.float32)
  dscale = tf.reduce_sum(dy * y, 0)
  dx = backward(y, state, dy * scale)
  return tf.reshape(tf.cast(dx, dtype), shape), dscale


def norm(
  x: mtf.Tensor, scale: mtf.Tensor, kind: str, factor: float = 1.0
) -> mtf.Tensor:
  """Normalizes over d_model and multiplies by a scale.

  Args:
    x: [..., d_model], activation dtype.
    scale: [d_model], float32.
    kind: value of NORM, "layer_norm" or "rms_norm".
    factor: constant by which the scale is multiplied.
  """
  is_native = kind in IS_CENTERED
  rows = [dim.name for dim in x.shape.dims[:-1]]

  def scaled(scale):
    return scale if factor == 1 else scale * factor

  def forward_slice(x, scale):
    return _norm(x, scaled(scale), kind)

  def native_forward(threads, x, scale):
    how = {"is_centered": IS_CENTERED[kind], "threads": threads}
    return tf.reshape(native.norm(_to_rows(x), scaled(scale), **how), x.shape)

  def backward_slice(x, scale, dy):
    dx, dscale = _norm_gradient(x, scaled(scale), dy, kind)
    return dx, scaled(dscale)

  def native_backward(threads, x, scale, dy):
    how = {"is_centered": IS_CENTERED[kind], "threads": threads}
    given = _to_rows(x), scaled(scale), _to_rows(dy)
    dx, dscale = native.norm_gradient(*given, **how)
    return tf.reshape(dx, x.shape), scaled(dscale)

  def gradient(op, dy):
    x, scale = op.inputs
    return WholeSlice(
      ByDevice(backward_slice, native_backward if is_native else None),
      [x, scale, dy],
      [(x.shape, x.dtype), (scale.shape, scale.dtype)],
      splittable=rows,
      name="norm_gradient",
    ).outputs

  return WholeSlice(
    ByDevice(forward_slice, native_forward if is_native else None),
    [x, scale],
    [(x.shape, x.dtype)],
    splittable=rows,
    gradient=gradient,
    is_kept=False,
    name="norm",
  ).outputs[0]


def rotary_tables(
  mesh: mtf.Mesh, length: mtf.Dimension, d_kv: mtf.Dimension
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Returns sin and cos of position * ROTARY_BASE ** (-2i / d_kv).

  Each is [length, d_kv / 2], float32, and indexed by position and i.
  """
  pairs = mtf.Dimension("d_kv_pairs", d_kv.size // 2)
  sin, cos = (
    mtf.import_tf_tensor(mesh, tf.constant(table), mtf.Shape([length, pairs]))
    for table in sines_and_cosines(length.size, d_kv.size)
  )
  return sin, cos


def sines_and_cosines(length: int, d_kv: int) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values of `rotary_tables` as NumPy arrays."""
  # Tables are in float32, because bfloat16 rounds position 257 to 256.
  frequency = ROTARY_BASE ** (-np.arange(d_kv // 2) / (d_kv // 2))
  angle = np.arange(length)[:, np.newaxis] * frequency
  return np.sin(angle).astype(np.float32), np.cos(angle).astype(np.float32)


def rotate_pairs(x: tf.Tensor, sin: tf.Tensor, cos: tf.Tensor) -> tf.Tensor:
  """Rotates pairs of numbers, one from each half of d_kv; keeps the dtype.

  Args:
    x: [..., d_kv].
    sin: float32, broadcasts to [..., d_kv / 2].
    cos: float32, broadcasts to [..., d_kv / 2].
  """
  x1, x2 = tf.split(tf.cast(x, tf.float32), 2, -1)
  y = tf.concat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)
  return tf.cast(y, x.dtype)


def apply_gate(gate: tf.Tensor, linear: tf.Tensor) -> tf.Tensor:
  """Returns swish(gate) * linear of one slice, in the dtype of `linear`."""
  # swish(z) = z sigmoid(z)
  gate, x = tf.cast(gate, tf.float32), tf.cast(linear, tf.float32)
  return tf.cast(gate * tf.sigmoid(gate) * x, linear.dtype)


def differentiate_gate(
  gate: tf.Tensor, linear: tf.Tensor, dy: tf.Tensor
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the gradients of both arguments of `apply_gate`, in their dtype."""
  dtype = gate.dtype
  gate, x, dy = (tf.cast(t, tf.float32) for t in (gate, linear, dy))
  sigmoid = tf.sigmoid(gate)
  dgate = dy * x * sigmoid * (1.0 + gate * (1.0 - sigmoid))
  return tf.cast(dgate, dtype), tf.cast(dy * gate * sigmoid, dtype)


# If the size of the mesh axis that splits `vocab` does not divide VOCAB_SIZE,
# the embedding is padded with rows of zeros. The logits of these rows are set
# to the dtype's lowest number, so that their softmax is 0 and argmax picks none
# of them. These logits have no gradient, so that the rows stay zeros.


def _exists(first, x, vocab_size):
  return tf.range(x.shape[-1]) + first < vocab_size


@fused
def _mask(first, x, vocab_size):
  return tf.where_v2(_exists(first, x, vocab_size), x, x.dtype.min)


@fused
def _mask_gradient(first, dy, vocab_size):
  return tf.where_v2(_exists(first, dy, vocab_size), dy, tf.zeros_like(dy))


def without_padding(logits: mtf.Tensor, vocab_size: int) -> mtf.Tensor:
  """Masks logits [batch, length, vocab] of tokens from `vocab_size` on."""
  vocab = logits.shape.dims[-1]
  if vocab.size == vocab_size:
    return logits

  def masked(x, fn, gradient=None):
    return WholeSlice(
      lambda first, x: fn(first, x, tf.constant(vocab_size)),
      [x],
      [(x.shape, x.dtype)],
      splittable=["batch", "vocab"],
      gradient=gradient,
      offset_of=vocab,
      name="without_padding",
    ).outputs[0]

  return masked(logits, _mask, lambda _, dy: [masked(dy, _mask_gradient)])
