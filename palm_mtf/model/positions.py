# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""How attention knows positions.

rotary           q and k are rotated by angles that grow with their positions
learned          a vector per position is added to the embeddings of tokens
alibi            scores += -slope(head) * distance
t5               scores += relative_bias[bucket(distance), head]
transformer_xl   scores += ((q + content_bias) k + (q + position_bias) r - q k)
                 * scale, where r is the vector of the distance

A distance is the position of a query minus the position of a key.
"""

import math
from collections.abc import Sequence

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import NUM_BUCKETS
from palm_mtf.architecture.rotary import (
  Rotary,
  find_frequencies,
  find_magnitude,
)
from palm_mtf.ops.slicewise import WholeSlice

# T5 adds the same bias to scores for this distance and all larger distances.
_T5_MAX_DISTANCE = 128

Angles = Sequence[tf.Tensor]


def rotary_tables(
  mesh: mtf.Mesh,
  length: mtf.Dimension,
  rotary: Rotary,
  positions: tf.Tensor | None = None,
  most: int = 0,
) -> list[mtf.Tensor]:
  """Returns sin and cos of the angles of rotary embedding, on a mesh.

  The angles are of `positions`, [length] int32, below `most`; or of 0, 1, 2 ...

  Both tables are [length, size / 2], float32, indexed by position and pair of a
  head's numbers. They include YaRN's factor of q and k (`find_magnitude`).
  """
  pairs = mtf.Dimension("d_kv_pairs", rotary.size // 2)
  tables = [
    tf.constant(table) if positions is None else tf.gather(table, positions)
    for table in sines_and_cosines(
      length.size if positions is None else most, rotary
    )
  ]
  shape = mtf.Shape([length, pairs])
  return [mtf.import_tf_tensor(mesh, x, shape) for x in tables]


def sines_and_cosines(
  length: int, rotary: Rotary
) -> tuple[np.ndarray, np.ndarray]:
  """Returns the values of `rotary_tables` as NumPy arrays."""
  # Tables are in float32, because bfloat16 rounds position 257 to 256.
  angle = np.arange(length)[:, np.newaxis] * find_frequencies(rotary)
  sin, cos = np.array([np.sin(angle), np.cos(angle)]) * find_magnitude(rotary)
  return sin.astype(np.float32), cos.astype(np.float32)


def rotate_pairs(
  x: tf.Tensor, sin: tf.Tensor, cos: tf.Tensor, rotary: Rotary
) -> tf.Tensor:
  """Applies rotary embedding: rotates pairs of numbers of each head.

  x is [..., d_kv], and so is the result, in the same dtype. sin and cos are
  float32, and broadcast to [..., rotary.size / 2].
  """
  size, width = rotary.size, x.shape[-1]
  y = tf.cast(x, tf.float32)
  rest = []
  if size < width:
    y, *rest = tf.split(y, [size, width - size], -1)
  # `split` returns the first, then the second numbers of all pairs; `join` is
  # its inverse.
  split, join = {
    "halves": (lambda y: tf.split(y, 2, -1), lambda ab: tf.concat(ab, -1)),
    "neighbours": (
      lambda y: (y[..., ::2], y[..., 1::2]),
      lambda ab: tf.reshape(tf.stack(ab, -1), tf.shape(y)),
    ),
  }[rotary.pairs]
  a, b = split(y)
  turned = join([a * cos - b * sin, b * cos + a * sin])
  turned.set_shape(y.shape)
  y = tf.concat([turned, *rest], -1) if rest else turned
  return tf.cast(y, x.dtype)


def add_positions(
  x: mtf.Tensor, table: mtf.Tensor, segments: mtf.Tensor | None
) -> mtf.Tensor:
  """Adds to each token's embedding the vector of its position.

  Args:
    x: [batch, length, d_model], activation dtype.
    table: [positions, d_model], activation dtype.
    segments: [batch, length], int32: number of each token's document. Positions
      count from the start of the document. None means one document per row.
  """
  rows, d_model = table.shape.dims
  others = [] if segments is None else [segments]

  def backward(dy, *segments):
    at = tf.broadcast_to(positions_of(dy, *segments), dy.shape[:2])
    dy = tf.cast(dy, tf.float32)
    return tf.cast(tf.math.unsorted_segment_sum(dy, at, rows.size), table.dtype)

  def gradient(op, dy):
    _, _, *segments = op.inputs
    (dtable,) = WholeSlice(
      backward,
      [dy, *segments],
      [(mtf.Shape([rows, d_model]), table.dtype)],
      splittable=["batch"],
      name="positions_gradient",
    ).outputs
    return [dy, dtable, *(None for _ in segments)]

  return WholeSlice(
    lambda x, table, *some: x + tf.gather(table, positions_of(x, *some)),
    [x, table, *others],
    [(x.shape, x.dtype)],
    splittable=["batch"],
    gradient=gradient,
    name="positions",
  ).outputs[0]


def positions_of(x: tf.Tensor, segments: tf.Tensor | None = None) -> tf.Tensor:
  """Returns positions within documents, [1 or batch, length], int32.

  x is [batch, length, ...]. For segments see `add_positions`.
  """
  at = tf.range(x.shape[1])[tf.newaxis]
  if segments is None:
    return at
  changes = tf.pad(
    tf.not_equal(segments[:, 1:], segments[:, :-1]), [[0, 0], [1, 0]]
  )
  # The largest start up to a position is the start of its document.
  starts = tf.where_v2(changes, at, 0)
  order = tf.where_v2(
    at[..., tf.newaxis] >= tf.range(x.shape[1]), starts[:, tf.newaxis], 0
  )
  return at - tf.reduce_max(order, -1)


def alibi_slopes(num_heads: int) -> np.ndarray:
  """Returns the slope of each head, [heads] float32 (Press et al. 2022, 3).

  If `num_heads` is no power of two, the slopes for the next smaller power come
  first; then, as in the authors' code, every other slope for the next larger.
  """
  power = 2 ** math.floor(math.log2(num_heads))

  def of_power(n: int) -> np.ndarray:
    return 2.0 ** (-8.0 * np.arange(1, n + 1) / n)

  more = of_power(2 * power)[::2][: num_heads - power]
  return np.concatenate([of_power(power), more]).astype(np.float32)


def distance_vectors(kernel: mtf.Tensor, length: int) -> mtf.Tensor:
  """Returns the vectors r of Transformer-XL's scores, [distances, heads, d_kv].

  r is the sinusoid of a distance, 0 to `length` - 1, times the kernel,
  [d_model, heads, d_kv], activation dtype.
  """
  d_model, heads, d_kv = kernel.shape.dims
  shape = mtf.Shape([mtf.Dimension("distances", length), heads, d_kv])

  def backward(dy):
    x = sinusoids(length, d_model.size)
    dkernel = tf.einsum("ld,lhk->dhk", x, tf.cast(dy, tf.float32))
    return tf.cast(dkernel, kernel.dtype)

  def gradient(_, dy):
    return WholeSlice(
      backward,
      [dy],
      [(kernel.shape, kernel.dtype)],
      splittable=["heads"],
      name="distance_vectors_gradient",
    ).outputs

  return WholeSlice(
    lambda w: project_distances(w, length),
    [kernel],
    [(shape, kernel.dtype)],
    splittable=["heads"],
    gradient=gradient,
    name="distance_vectors",
  ).outputs[0]


def project_distances(kernel: tf.Tensor, length: int) -> tf.Tensor:
  """Computes `distance_vectors` on one device, [length, heads, d_kv]."""
  x = sinusoids(length, kernel.shape[0])
  y = tf.einsum("ld,dhk->lhk", x, tf.cast(kernel, tf.float32))
  return tf.cast(y, kernel.dtype)


def sinusoids(length: int, width: int) -> tf.Tensor:
  """Returns sinusoids of distances 0 to length - 1, [length, width] float32.

  (Vaswani et al. 2017, 3.5; sines first, as in Dai et al. 2019.)
  """
  half = (width + 1) // 2
  frequency = 10_000.0 ** (-tf.cast(tf.range(half), tf.float32) / half)
  angle = tf.cast(tf.range(length), tf.float32)[:, tf.newaxis] * frequency
  return tf.concat([tf.sin(angle), tf.cos(angle)], -1)[:, :width]


def _t5_buckets(distance):
  # Half of the buckets hold one distance each; the others hold ranges, which
  # grow with the distance (Raffel et al. 2020, 2.1, and their code for
  # decoders). Keys after the query are in bucket 0; the causal mask hides them.
  exact = NUM_BUCKETS // 2
  distance = tf.maximum(distance, 0)
  far = tf.cast(tf.maximum(distance, 1), tf.float32) / exact
  growth = (NUM_BUCKETS - exact) / math.log(_T5_MAX_DISTANCE / exact)
  bucket = exact + tf.cast(tf.math.log(far) * growth, tf.int32)
  bucket = tf.minimum(bucket, NUM_BUCKETS - 1)
  return tf.where_v2(distance < exact, distance, bucket)


def _alibi(q, distance, scale, slopes):
  del scale  # of products of q and k only
  far = tf.cast(tf.abs(distance), tf.float32)[:, :, tf.newaxis]
  return q, -slopes[:, tf.newaxis] * far


def _t5(q, distance, scale, table):
  del scale  # of products of q and k only
  found = tf.gather(tf.transpose(table), _t5_buckets(distance), axis=1)
  return q, tf.transpose(found, [1, 2, 0, 3])  # [batch, length, heads, keys]


def _transformer_xl(q, distance, scale, content_bias, position_bias, vectors):
  wide = tf.cast(q, tf.float32)
  by_distance = tf.einsum(
    "blhk,dhk->blhd", wide + position_bias, tf.cast(vectors, tf.float32)
  )
  batch, length, heads, _ = by_distance.shape
  # Keys after a query are masked, so their distance does not matter.
  at = tf.maximum(distance, 0)[:, :, tf.newaxis]
  at = tf.broadcast_to(at, [batch, length, heads, at.shape[-1]])
  found = tf.gather(by_distance, at, axis=3, batch_dims=3)
  return tf.cast(wide + content_bias, q.dtype), found * scale


_SCORES = {"alibi": _alibi, "t5": _t5, "transformer_xl": _transformer_xl}


def score_by_distance(
  positions: str,
  q: tf.Tensor,
  distance: tf.Tensor,
  scale: float,
  extras: Sequence[tf.Tensor],
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns the queries to multiply by keys, and a bias for each score.

  Args:
    positions: "alibi", "t5" or "transformer_xl".
    q: [batch, length, heads, d_kv], activation dtype.
    distance: [1 or batch, length, memory_length], int32.
    scale: factor of the products of q and k.
    extras: slopes, [heads] (alibi); the table, [buckets, heads] (t5); or both
      biases, [heads, d_kv], and the vectors of all distances that occur,
      [distances, heads, d_kv] (transformer_xl).

  Returns:
    Queries, shape and dtype of q; and biases, [1 or batch, length, heads,
    memory_length] float32, to add to scores after they are multiplied by scale.
  """
  return _SCORES[positions](q, distance, scale, *extras)
