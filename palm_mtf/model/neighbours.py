# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Chunked cross-attention to neighbours of earlier text (RETRO).

The inputs of a row are cut into chunks of m = CHUNK_LENGTH tokens. A chunk has
NEIGHBOURS neighbours: texts of r = 2 m tokens. Let x be the activations of the
row, and e those of its neighbours. A layer with NEIGHBOURS ends with

  e = block(e)                      each neighbour apart, without a causal mask
  e = e + attend(norm(e), norm(x))  each neighbour to all of its chunk
  x = x + attend(norm(x), norm(e))  each position to all of a chunk's neighbours

A position attends to the neighbours of the last chunk that ends with it or
before it, so that it depends on no later token; the first m - 1 positions
attend to none (Borgeaud et al. 2022, 2.4 and listing 1). Positions for rotary
embedding count from the start of the chunk for a row, and from the start of the
neighbour for a neighbour. So the second half of a neighbour has the positions
of the text after the chunk.
"""

import functools
from collections.abc import Callable, Sequence

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.rotary import Rotary
from palm_mtf.config import ModelConfig
from palm_mtf.config.neighbours import num_neighbours
from palm_mtf.model.attention import Heads, visible_softmax
from palm_mtf.model.positions import rotate_pairs, sines_and_cosines
from palm_mtf.ops.recompute import recompute
from palm_mtf.ops.slicewise import WholeSlice


class Neighbours:
  """The neighbours of the rows of a batch.

  Attributes:
    tokens: [batch, length], int32: all neighbours of the row, in the order of
      the chunks, then of the neighbours; -1 after the end of a neighbour.
  """

  def __init__(self, config: ModelConfig, tokens: mtf.Tensor):
    self.tokens, self._chunk = tokens, config.chunk_length
    # Positions of all tokens of a chunk's neighbours, and of a chunk's tokens.
    of_all = np.tile(np.arange(2 * self._chunk), num_neighbours(config))
    self._at = of_all, np.arange(self._chunk)

  def split(self, stream: mtf.Tensor) -> list[mtf.Tensor]:
    """Returns x and e; `stream` has both, joined along `length`."""
    own = self.tokens.shape.dims[1].size
    first = stream.shape.dims[1].size - own
    parts = (0, first), (first, own)
    return [mtf.slice(stream, begin, n, "length") for begin, n in parts]

  def apart(self, x: mtf.Tensor) -> mtf.Tensor:
    """Returns x [batch, length, ...] with a row per neighbour."""
    batch, length, *others = x.shape.dims
    r = mtf.Dimension("length", 2 * self._chunk)
    rows = mtf.Dimension("batch", batch.size * length.size // r.size)
    return mtf.reshape(x, mtf.Shape([rows, r, *others]))

  def present(self) -> mtf.Tensor:
    """Returns 1 for each token of a neighbour, 0 after its end; see `apart`."""
    is_token = mtf.greater_equal(self.tokens, mtf.zeros_like(self.tokens))
    return self.apart(mtf.cast(is_token, tf.int32))

  def condition(self, qkv: list[mtf.Tensor], *how: object) -> mtf.Tensor:
    """Attends from all tokens of neighbours to their chunks.

    q is [batch, length of `tokens`, heads, d_kv]; k and v are of the row,
    [batch, length, (key_heads,) d_kv]; `how` is (scale, rotary).
    """
    return _on_slices(functools.partial(_mix, self._at, *how), qkv)

  def attend(self, qkv: list[mtf.Tensor], *how: object) -> mtf.Tensor:
    """Attends from a row to its neighbours; like `condition`, but reversed."""
    before, none = self._chunk - 1, [[0, 0]] * 2
    at = self._at[1] + before, self._at[0]

    def attend(q, *others):
      late = tf.pad(q[:, before:], [[0, 0], [0, before], *none])
      out = _mix(at, *how, late, *others)[:, : q.shape[1] - before]
      return tf.pad(out, [[0, 0], [before, 0], *none])

    return _on_slices(attend, [*qkv, self.tokens])


def _mix(at, scale, rotary, q, k, v, *tokens):
  # Computes the attention within chunks on a device's slices, in the shape of
  # q. `at` has the positions of q and k in a chunk. Keys are hidden where
  # `tokens` are negative.
  def cut(x, positions):
    return tf.reshape(x, [-1, len(positions), *x.shape[2:]])

  queries, keys, values = cut(q, at[0]), cut(k, at[1]), cut(v, at[1])
  if rotary:
    queries = _rotate(queries, at[0], rotary)
    keys = _rotate(keys, at[1], rotary)
  heads, visible = Heads(q.shape[2], keys.shape), tf.ones([1] * 4, tf.bool)
  for x in tokens:
    visible = cut(x, at[1])[:, tf.newaxis, tf.newaxis] >= 0
  weights = visible_softmax(heads.scores(queries, keys), visible, scale)
  # Without any visible key, all weights would be equal, not 0.
  weights *= tf.cast(visible, weights.dtype)
  return tf.reshape(heads.outputs(weights, values), q.shape)


def _rotate(x, positions: np.ndarray, rotary: Rotary):
  shape = len(positions), *([1] * (x.shape.rank - 3)), -1
  tables = sines_and_cosines(positions.max() + 1, rotary)
  angles = (tf.constant(y[positions].reshape(shape)) for y in tables)
  return rotate_pairs(x, *angles, rotary)


def _on_slices(
  fn: Callable[..., tf.Tensor], inputs: Sequence[mtf.Tensor]
) -> mtf.Tensor:
  """Returns fn(q, k, v, *others) of slices, in the shape of q."""

  def backward(dy, *inputs):
    # Copies, because q, k and v may depend on one another through the model.
    qkv = [tf.identity(x) for x in inputs[:3]]
    return tuple(tf.gradients(fn(*qkv, *inputs[3:]), qkv, dy))

  def apply(fn, inputs, like, gradient=None):
    return WholeSlice(
      *(fn, inputs, [(x.shape, x.dtype) for x in like]),
      splittable=["batch", "heads"],
      gradient=gradient,
      name="cross_attention",
    ).outputs

  def gradient(op, dy):
    qkv, others = [recompute(x, dy) for x in op.inputs[:3]], op.inputs[3:]
    found = apply(backward, [dy, *qkv, *others], qkv)
    return [*found, *(None for _ in others)]

  return apply(fn, inputs, inputs[:1], gradient)[0]
