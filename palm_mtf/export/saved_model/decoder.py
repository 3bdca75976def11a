# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of model/palm.py in plain TensorFlow, with dynamic shapes.

The SavedModel needs no Mesh TensorFlow, XLA or palm_mtf.
"""

from collections.abc import Callable

import numpy as np

from palm_mtf._tf import tf2
from palm_mtf.architecture.block import NORMS, rotary_of
from palm_mtf.architecture.parameters import layer_name, parameter_shapes
from palm_mtf.config import PalmConfig
from palm_mtf.model.activations import activate
from palm_mtf.model.attention import visible_softmax
from palm_mtf.model.layers import normalize
from palm_mtf.model.positions import find_angles, rotate_pairs

# Tensors [batch, memory_length, key_heads, d_kv]: keys of layer 0, values of
# layer 0, keys of layer 1, and so on. Multi-query attention has 1 key head.
Cache = list[tf2.Tensor]


class Decoder(tf2.Module):
  """The forward pass of the model, with the float32 weights from `read`."""

  def __init__(self, model: PalmConfig, read: Callable[[str], np.ndarray]):
    super().__init__("decoder")
    self._model = model
    self._weights = {
      name: tf2.Variable(read(name), trainable=False, name=name)
      for name in parameter_shapes(model)
    }

  def make_empty_cache(
    self, num_rows: tf2.Tensor, memory_length: tf2.Tensor
  ) -> Cache:
    """Returns a cache of zeros for `hidden` to fill."""
    model = self._model
    key_heads = 1 if model.attention == "multi_query" else model.num_heads
    shape = [num_rows, memory_length, key_heads, model.d_kv]
    return [tf2.zeros(shape) for _ in range(2 * model.num_layers)]

  def hidden(
    self,
    tokens: tf2.Tensor,
    start: tf2.Tensor,
    cache: Cache,
    num_given: tf2.Tensor | None = None,
  ) -> tuple[tf2.Tensor, Cache]:
    """Computes the forward pass of tokens that follow the cached tokens.

    Args:
      tokens: [batch, length], int32.
      start: [batch], int32: position of each row's first token.
      num_given: [batch], int32: if the OBJECTIVE has bidirectional attention to
        inputs, the number of inputs at the start of each row; None means 0.

    Returns:
      The output of the last norm, [batch, length, d_model], and the cache with
      the keys and values of `tokens` added.
    """
    model = self._model
    length = tf2.shape(tokens)[1]
    positions = start[:, tf2.newaxis] + tf2.range(length)
    rows = tf2.range(tf2.shape(tokens)[0])[:, tf2.newaxis]
    at = tf2.stack([tf2.broadcast_to(rows, tf2.shape(tokens)), positions], -1)
    memory = tf2.range(tf2.shape(cache[0])[1])
    visible = memory <= positions[..., tf2.newaxis]  # the causal mask
    if model.has_prefix and num_given is not None:
      visible |= memory < num_given[:, tf2.newaxis, tf2.newaxis]
    tables = find_angles(model, model.sequence_length)
    angles = [tf2.gather(x, positions)[:, :, tf2.newaxis] for x in tables]
    x, after = tf2.gather(self._weights["embedding"], tokens), []
    for index in range(model.num_layers):
      layer, kept = layer_name(index), cache[2 * index : 2 * index + 2]
      y = self._apply_norm(f"{layer}/norm", x)
      attention, kept = self._attend(layer, y, at, visible, angles, kept)
      after += kept
      if model.block == "serial":
        x += attention
        x += self._feed_forward(layer, self._apply_norm(f"{layer}/mlp_norm", x))
      else:
        x += attention + self._feed_forward(layer, y)
    return self._apply_norm("final_norm", x), after

  def logits(self, y: tf2.Tensor) -> tf2.Tensor:
    """Returns logits [..., vocab] for the last norm's output [..., d_model]."""
    y *= self._model.d_model**-0.5
    return tf2.einsum("...d,vd->...v", y, self._weights["embedding"])

  def _apply_norm(self, name: str, x: tf2.Tensor) -> tf2.Tensor:
    statistic = NORMS[self._model.norm].statistic
    y = normalize(x, statistic, self._model.norm_epsilon)
    scale = self._weights.get(f"{name}/scale")
    return y if scale is None else y * scale  # FINAL_NORM_SCALE = "none"

  def _attend(self, layer, y, at, visible, angles, cache):
    def project(part):
      kernel = self._weights[f"{layer}/attention/{part}"]
      kernel = tf2.reshape(kernel, [self._model.d_model, -1, self._model.d_kv])
      return tf2.einsum("bld,dhk->blhk", y, kernel)

    q, k = (
      rotate_pairs(project(part), *angles, rotary_of(self._model))
      for part in "qk"
    )
    keys, values = (
      tf2.tensor_scatter_nd_update(old, at, new)
      for old, new in zip(cache, (k, project("v")), strict=True)
    )
    # In the einsums, n is a key head, and g is a query head of this key head.
    batch, length, heads, d_kv = tf2.unstack(tf2.shape(q))
    q = tf2.reshape(q, [batch, length, keys.shape[2], -1, d_kv])
    scores = tf2.einsum("blngk,bmnk->bnglm", q, keys)
    weights = visible_softmax(
      scores, visible[:, tf2.newaxis, tf2.newaxis], self._model.d_kv**-0.5
    )
    y = tf2.einsum("bnglm,bmnk->blngk", weights, values)
    y = tf2.reshape(y, [batch, length, heads, d_kv])
    kernel = self._weights[f"{layer}/attention/o"]
    return tf2.einsum("blhk,hkd->bld", y, kernel), [keys, values]

  def _feed_forward(self, layer: str, y: tf2.Tensor) -> tf2.Tensor:
    gate, linear = (
      tf2.einsum("bld,df->blf", y, self._weights[f"{layer}/mlp/{name}"])
      for name in ("wi_gate", "wi")
    )
    kernel = self._weights[f"{layer}/mlp/wo"]
    hidden = activate([gate, linear], "swish")
    return tf2.einsum("blf,fd->bld", hidden, kernel)
