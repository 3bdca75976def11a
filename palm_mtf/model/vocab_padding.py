# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of the rows that pad the embedding, masked."""

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused

# Where a mesh axis does not divide VOCAB_SIZE, the embedding has rows of zeros
# behind its last token. Their logits become the least number there is: they
# have no share in any softmax and are never the largest. No gradient comes from
# them, so that the rows stay zeros.


def _exists(first, x, vocab_size):
  return tf.range(x.shape[-1]) + first < vocab_size


@fused
def _masked(first, x, vocab_size):
  return tf.where_v2(_exists(first, x, vocab_size), x, x.dtype.min)


@fused
def _masked_gradient(first, dy, vocab_size):
  return tf.where_v2(_exists(first, dy, vocab_size), dy, tf.zeros_like(dy))


def without_padding(logits: mtf.Tensor, vocab_size: int) -> mtf.Tensor:
  """Returns logits [batch, length, vocab], masked from `vocab_size` on."""
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

  return masked(logits, _masked, lambda _, dy: [masked(dy, _masked_gradient)])
