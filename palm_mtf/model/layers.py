# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Embedding, norms and biases, with their gradients."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import NormForm
from palm_mtf.native import layers as native
from palm_mtf.native.operations import IS_CENTERED
from palm_mtf.ops.slicewise import ByDevice, WholeSlice
from palm_mtf.ops.xla import fused


def local_rows(first: tf.Tensor, tokens: tf.Tensor, rows: int) -> tf.Tensor:
  """Returns each token's row in one slice of `vocab`; -1 if not in the slice.

  The slice begins at token `first`, [] int32. `tokens` are [...], int32.
  """
  row = tokens - first
  # -1, because unsorted_segment_sum ignores segment -1.
  return tf.where_v2((row >= 0) & (row < rows), row, -1)


def local_embedding(
  first: tf.Tensor, table: tf.Tensor, tokens: tf.Tensor, scale: float = 1.0
) -> tf.Tensor:
  """Looks up tokens in a table's slice, [rows, d_model]; multiplies by `scale`.

  Tokens that are not in the slice give zeros; for arguments see `local_rows`.
  """
  row = local_rows(first, tokens, table.shape[0])
  found = tf.gather(table, tf.maximum(row, 0))
  found = found if scale == 1 else found * scale
  return tf.where_v2((row >= 0)[..., tf.newaxis], found, tf.zeros_like(found))


def _embed_gradient(first, rows, tokens, dy):
  (num_rows,) = rows.shape
  row = local_rows(first, tokens, num_rows)
  # Sums are in float32, because a frequent token's sum has thousands of terms.
  return tf.math.unsorted_segment_sum(tf.cast(dy, tf.float32), row, num_rows)


def embed(
  table: mtf.Tensor,
  tokens: mtf.Tensor,
  gradient_dtype: tf.DType | None = None,
  scale: float = 1.0,
) -> mtf.Tensor:
  """Looks up each token's row of the table; returns [batch, length, d_model].

  Args:
    table: [vocab, d_model], activation dtype.
    tokens: [batch, length], int32 in [0, vocab).
    gradient_dtype: dtype of the table's gradient; None is the table's dtype.
    scale: EMBEDDING_SCALE, which multiplies the rows.
  """
  vocab, d_model = table.shape.dims
  gradient_dtype = gradient_dtype or table.dtype

  def gradient(op, dy):
    table, tokens = op.inputs
    # The gradient needs only the number of rows, so the table is not kept.
    rows = mtf.zeros(dy.mesh, mtf.Shape([vocab]), tf.int32)
    return [
      WholeSlice(
        lambda *inputs: tf.cast(
          scale * _embed_gradient(*inputs), gradient_dtype
        ),
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
    lambda *inputs: local_embedding(*inputs, scale),
    [table, tokens],
    [(tokens.shape + d_model, table.dtype)],
    splittable=["batch", "vocab"],
    gradient=gradient,
    offset_of=vocab,
    name="embed",
  ).outputs[0]


# Norms of x, [..., d_model] float32, without scale and bias. They return the
# result y and, for the gradient, 1 / sqrt(statistic + epsilon), [..., 1].


def _by_mean_square(x, epsilon):
  rsqrt = tf.math.rsqrt(
    tf.reduce_mean(tf.square(x), -1, keepdims=True) + epsilon
  )
  return x * rsqrt, rsqrt


def _by_variance(x, epsilon):
  return _by_mean_square(x - tf.reduce_mean(x, -1, keepdims=True), epsilon)


# dx is orthogonal to y, and to a vector of ones if the norm subtracts the mean.


def _by_mean_square_gradient(y, rsqrt, dy):
  return (dy - y * tf.reduce_mean(dy * y, -1, keepdims=True)) * rsqrt


def _by_variance_gradient(y, rsqrt, dy):
  dx = dy - y * tf.reduce_mean(dy * y, -1, keepdims=True)
  return (dx - tf.reduce_mean(dy, -1, keepdims=True)) * rsqrt


# {`statistic` of `normalize`: the norm's function, and that of its gradient}
_STATISTICS = {
  "variance": (_by_variance, _by_variance_gradient),
  "mean_square": (_by_mean_square, _by_mean_square_gradient),
}


def normalize(x: tf.Tensor, statistic: str, epsilon: float) -> tf.Tensor:
  """Normalizes x [..., d_model], any float dtype, without a scale, to float32.

  `statistic`: "variance" subtracts the mean of x and divides by the standard
  deviation; "mean_square" divides by the root mean square. `epsilon`
  (NORM_EPSILON) is added to the statistic before the square root.
  """
  forward, _ = _STATISTICS[statistic]
  return forward(tf.cast(x, tf.float32), epsilon)[0]


@fused
def apply_norm(
  x: tf.Tensor,
  statistic: str,
  epsilon: float,
  scale: tf.Tensor,
  *bias: tf.Tensor,
) -> tf.Tensor:
  """Normalizes x, multiplies by a scale, and adds a bias if there is one.

  `scale` and `bias` are [d_model], float32. For the other arguments see
  `normalize`. The result has the dtype of x.
  """
  y = normalize(x, statistic, epsilon) * scale
  for each in bias:
    y += each
  return tf.cast(y, x.dtype)


def to_rows(x: tf.Tensor) -> tf.Tensor:
  """Reshapes x, [..., columns], to [rows, columns]."""
  return tf.reshape(x, [-1, x.shape[-1]])


@fused
def _norm_gradient(x, scale, dy, statistic, epsilon):
  # Returns the gradients of x, the scale and the bias.
  forward, backward = _STATISTICS[statistic]
  shape, dtype = x.shape, x.dtype
  # x and dy become matrices, because on CPUs XLA's sums over two dimensions
  # take twice as long as sums over one dimension.
  x, dy = to_rows(x), to_rows(dy)
  y, state = forward(tf.cast(x, tf.float32), epsilon)
  dy = tf.cast(dy, tf.float32)
  dscale, dbias = tf.reduce_sum(dy * y, 0), tf.reduce_sum(dy, 0)
  dx = backward(y, state, dy * scale)
  return tf.reshape(tf.cast(dx, dtype), shape), dscale, dbias


def norm(
  x: mtf.Tensor,
  vectors: Sequence[mtf.Tensor],
  form: NormForm,
  epsilon: float,
  factor: float = 1.0,
) -> mtf.Tensor:
  """Normalizes over d_model and multiplies by a scale; may add a bias.

  Args:
    x: [..., d_model], activation dtype.
    vectors: the scale, [d_model] float32, and the bias if the form has one.
    form, epsilon: the norm of the setting NORM, and NORM_EPSILON.
    factor: constant by which the result is multiplied.
  """
  is_native = form.statistic in IS_CENTERED and len(vectors) == 1
  rows = [dim.name for dim in x.shape.dims[:-1]]
  how = form.statistic, epsilon

  def times_factor(xs):
    return [x if factor == 1 else x * factor for x in xs]

  def scaled(scale, *bias):
    if form.scale_offset:
      scale = scale + form.scale_offset
    return times_factor([scale, *bias])

  def forward_slice(x, *vectors):
    return apply_norm(x, *how, *scaled(*vectors))

  def native_options(threads):
    is_centered = IS_CENTERED[form.statistic]
    return dict(is_centered=is_centered, epsilon=epsilon, threads=threads)

  def native_forward(threads, x, scale):
    y = native.norm(to_rows(x), *scaled(scale), **native_options(threads))
    return tf.reshape(y, x.shape)

  def backward_slice(x, dy, *vectors):
    scale, *_ = scaled(*vectors)
    dx, *gradients = _norm_gradient(x, scale, dy, *how)
    return (dx, *times_factor(gradients[: len(vectors)]))

  def native_backward(threads, x, dy, scale):
    given = to_rows(x), *scaled(scale), to_rows(dy)
    dx, dscale = native.norm_gradient(*given, **native_options(threads))
    return (tf.reshape(dx, x.shape), *times_factor([dscale]))

  def gradient(op, dy):
    x, *vectors = op.inputs
    return WholeSlice(
      ByDevice(backward_slice, native_backward if is_native else None),
      [x, dy, *vectors],
      [(each.shape, each.dtype) for each in (x, *vectors)],
      splittable=rows,
      name="norm_gradient",
    ).outputs

  return WholeSlice(
    ByDevice(forward_slice, native_forward if is_native else None),
    [x, *vectors],
    [(x.shape, x.dtype)],
    splittable=rows,
    gradient=gradient,
    is_kept=False,
    name="norm",
  ).outputs[0]


def add_bias(x: mtf.Tensor, bias: mtf.Tensor) -> mtf.Tensor:
  """Adds a bias, [outputs] float32, to x [batch, length, outputs].

  x has any float dtype; the gradient of the bias is added up in float32.
  """

  def gradient(op, dy):
    (dbias,) = WholeSlice(
      lambda dy: tf.reduce_sum(tf.cast(to_rows(dy), tf.float32), 0),
      [dy],
      [(bias.shape, bias.dtype)],
      splittable=dy.shape.dimension_names,
      name="bias_gradient",
    ).outputs
    return [dy, dbias]

  return WholeSlice(
    lambda x, bias: x + tf.cast(bias, x.dtype),
    [x, bias],
    [(x.shape, x.dtype)],
    splittable=x.shape.dimension_names,
    gradient=gradient,
    name="bias",
  ).outputs[0]


# If the size of the mesh axis that splits `vocab` does not divide VOCAB_SIZE,
# rows of zeros pad the embedding. Their logits are set to the dtype's lowest
# number, so that their softmax is 0 and argmax picks none of them. These logits
# have no gradient, so that the rows stay zeros.


@fused
def _mask(first, x, vocab_size, is_gradient):
  exists = tf.range(x.shape[-1]) + first < vocab_size
  padding = 0.0 if is_gradient else x.dtype.min
  return tf.where_v2(exists, x, tf.constant(padding, x.dtype))


def without_padding(logits: mtf.Tensor, vocab_size: int) -> mtf.Tensor:
  """Masks padding in logits [batch, length, vocab], from `vocab_size` on."""
  vocab = logits.shape.dims[-1]
  if vocab.size == vocab_size:
    return logits

  def masked(x, gradient=None):
    is_gradient = gradient is None
    return WholeSlice(
      lambda first, x: _mask(first, x, tf.constant(vocab_size), is_gradient),
      [x],
      [(x.shape, x.dtype)],
      splittable=["batch", "vocab"],
      gradient=gradient,
      offset_of=vocab,
      name="without_padding",
    ).outputs[0]

  return masked(logits, lambda _, dy: [masked(dy)])
