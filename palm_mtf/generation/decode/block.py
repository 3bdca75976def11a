# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The Transformer block of a decoding step, which reads a cache.

This is the block of model/palm.py in plain TensorFlow. It computes new tokens
of each sequence in a batch: one in the decoding step (step.py), one or more in
the exported SavedModel (export/saved_model/decoder.py).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from palm_mtf._tf import tf
from palm_mtf.architecture.block import (
  Attention,
  Branch,
  Layer,
  NormForm,
  Projection,
  Read,
)
from palm_mtf.model.attention import visible_softmax
from palm_mtf.model.layers import normalize
from palm_mtf.model.positions import score_by_distance
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.xla import fused


class Block(Protocol):
  """A layer's operations, which decoding steps and SavedModels implement."""

  def add_and_norm(self, x: Any, branch: list, norm: str) -> tuple[Any, Any]:
    """Returns x + branch, [rows, ..., d_model], and a norm of this sum.

    `branch` is [] or has one tensor; `norm` is the norm's name in the layer.
    """

  def mix(self, y: Any, read: Read) -> Mapping[Projection, Any]:
    """Computes attention, the MLP or both, as `read` lists, from y.

    y is the normalized x. Returns {output projection: input of the projection}.
    """

  def run_experts(self, y: Any, branch: Branch) -> Any:
    """Returns the sum of the results of each token's experts, shaped as y."""

  def project_out(
    self, branches: Mapping[Projection, Any], others: Sequence[Any]
  ) -> Any:
    """Returns the sum of output projections of `branches` and of `others`.

    The sum includes the projections' biases.
    """


def run_layer(layer: Layer, block: Block, x: Any, branch: Any) -> tuple:
  """Runs one layer on the residual stream, x + branch; returns x and branch.

  `branch` is the latest output of attention and MLP, not yet added to x. The
  next norm adds `branch` to x in the same pass over memory as it normalizes x.
  """
  for each in layer.sums:
    branches: dict[Projection, Any] = {}
    others = []
    for i, read in enumerate(each.reads):
      x, y = block.add_and_norm(x, [] if i else [branch], read.norm)
      if read.joined:
        branches.update(block.mix(y, read))
      if read.sparse:
        others.append(block.run_experts(y, read.sparse))
    branch = block.project_out(branches, others)
    if each.output_norm:
      _, branch = block.add_and_norm(branch, [], each.output_norm)
  return x, branch


def mix_products(
  read: Read, parts: Sequence[tf.Tensor], attend: Callable[..., tf.Tensor]
) -> list[tf.Tensor]:
  """Returns the input of each output projection, in the order of `read`.

  `read` lists attention, the MLP or both. `parts` has q, k and v of attention,
  and the MLP's hidden layer, which is returned as it is. `attend` takes q, k, v
  and the `Attention`, and returns attention's result.
  """
  mixed, parts = [], list(parts)
  for branch in read.joined:
    if isinstance(branch.mixer, Attention):
      q, k, v, *parts = parts
      mixed.append(attend(q, k, v, branch.mixer))
    else:
      hidden, *parts = parts
      mixed.append(hidden)
  return mixed


@fused
def add_and_scale(
  x: tf.Tensor, branch: list, form: NormForm, epsilon: float, vectors: list
) -> tuple[tf.Tensor, tf.Tensor]:
  """Returns x + branch, and this sum normalized, scaled and biased.

  x is [rows, ..., d_model]; `branch` is [] or one tensor like x. `vectors` are
  the norm's scale plus NORM's offset, and any bias, [d_model] each.
  """
  for each in branch:
    x += each
  scale, *bias = vectors
  y = normalize(x, form.statistic, epsilon) * scale
  for each in bias:
    y += each
  return x, tf.cast(y, x.dtype)


@fused
def _softmax(scores, positions, window, num_given, scale, bias):
  # scores and bias: [rows, key_heads, queries, memory_length]; positions:
  # [rows, queries] or [rows, 1]; num_given: [] or one tensor, [rows]: all
  # queries of a row see the first `num_given` keys of the row.
  at = positions[:, tf.newaxis, :, tf.newaxis]
  key = tf.range(tf.shape(scores)[-1])
  visible = key <= at
  if window is not None:
    visible &= key > at - window
  for each in num_given:
    visible |= key < tf.reshape(each, [-1, 1, 1, 1])
  return visible_softmax(scores, visible, scale, *bias)


def _find_shape(x):
  # Returns the sizes of dimensions; sizes that are not static are tensors.
  if x.shape.is_fully_defined():
    return x.shape.as_list()
  sizes = tf.unstack(tf.shape(x))
  return [sizes[i] if n is None else n for i, n in enumerate(x.shape.as_list())]


def _by_key_head(x, key_heads):
  # Changes [rows, tokens, heads, n] to [rows, key_heads, queries, n]. Each
  # query is a pair of a token and one of the heads that share a key head.
  rows, tokens, heads, n = _find_shape(x)
  group = heads // key_heads
  if x.shape[1] != 1:
    x = tf.reshape(x, [rows, tokens, key_heads, group, n])
    x = tf.transpose(x, [0, 2, 1, 3, 4])
  return tf.reshape(x, [rows, key_heads, tokens * group, n])


def attend_to_cache(
  q: tf.Tensor,
  keys: tf.Tensor,
  values: tf.Tensor,
  positions: tf.Tensor,
  mixer: Attention,
  extras: Sequence[tf.Tensor],
  num_given: Sequence[tf.Tensor] = (),
) -> tf.Tensor:
  """Attends from new tokens to the cache; returns [rows, tokens, heads * d_kv].

  Args:
    q: [rows, tokens, heads, d_kv].
    keys: [rows, memory_length, d_kv] or [rows, key_heads, memory_length, d_kv];
      includes the new tokens.
    values: shape of keys.
    positions: [rows, tokens], int32.
    mixer: how positions change scores, the window and the scale.
    extras: ALiBi's slopes, or T5's or Transformer-XL's parameters; else ().
    num_given: () or one tensor, [rows] int32: number of tokens at the start of
      each row that all tokens see.
  """
  if keys.shape.rank == 3:
    keys, values = keys[:, tf.newaxis], values[:, tf.newaxis]
  rows, tokens, heads, d_kv = _find_shape(q)
  key_heads = keys.shape[1]
  bias: list[tf.Tensor] = []
  group, scale = heads // key_heads, mixer.factor(d_kv)
  if mixer.score_positions:
    distance = positions[..., tf.newaxis] - tf.range(tf.shape(keys)[2])
    q, *bias = score_by_distance(
      mixer.score_positions, q, distance, scale, extras
    )
  scores = matmul(_by_key_head(q, key_heads), keys, transpose_b=True)
  if q.shape[1] != 1:
    positions = tf.repeat(positions, group, axis=1)
  weights = _softmax(
    scores,
    positions,
    mixer.window,
    list(num_given),
    scale,
    [_by_key_head(x, key_heads) for x in bias],
  )
  y = matmul(weights, values)
  if q.shape[1] != 1:
    y = tf.reshape(y, [rows, key_heads, tokens, group, d_kv])
    y = tf.transpose(y, [0, 2, 1, 3, 4])
  return tf.reshape(y, [rows, tokens, heads * d_kv])
