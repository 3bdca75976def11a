# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Logits of tokens that do not exist.

Where a mesh axis does not divide VOCAB_SIZE, the embedding has rows of zeros
behind its last token. Their logits are the least number there is, so that they
have no share in any softmax and are never the largest; no gradient comes from
them, so that the rows stay zeros.
"""

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice, slice_offset
from palm_mtf.ops.xla import fused

LaidOut = mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor


def _exists(first, x, vocab_size):
  return tf.range(x.shape[-1]) + first < vocab_size


@fused
def _masked(first, x, vocab_size):
  return tf.where_v2(_exists(first, x, vocab_size), x, x.dtype.min)


@fused
def _masked_gradient(first, dy, vocab_size):
  return tf.where_v2(_exists(first, dy, vocab_size), dy, tf.zeros_like(dy))


def without_padding(logits: mtf.Tensor, vocab_size: int) -> mtf.Tensor:
  """Returns logits whose padding has no share in anything.

  Args:
    logits: [batch, length, vocab].
    vocab_size: how many tokens exist; returned as they are if all do.
  """
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


def laid_out_without_padding(
  mesh_impl: mtf.MeshImpl,
  vocab: mtf.Dimension,
  logits: LaidOut,
  vocab_size: int,
) -> LaidOut:
  """Returns what `without_padding` does, where there is no Mesh graph.

  Args:
    mesh_impl: devices and layout of the logits.
    vocab: their last dimension.
    logits: [..., vocab], laid out.
    vocab_size: how many tokens exist.
  """
  if vocab.size == vocab_size:
    return logits
  return mesh_impl.slicewise(
    _masked,
    slice_offset(mesh_impl, vocab),
    logits,
    tf.constant(vocab_size),
  )
