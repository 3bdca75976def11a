# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The forward pass of a SavedModel, over one or several tokens per row.

It computes layers as decoding does (generation/decode/block.py). Shapes are
dynamic. The SavedModel needs no Mesh TensorFlow, XLA or palm_mtf.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from palm_mtf._tf import tf2
from palm_mtf.architecture.block import (
  NORMS,
  ROUTER_BIAS,
  Branch,
  NormForm,
  Projection,
  Read,
  model_of,
)
from palm_mtf.architecture.parameters import (
  layer_name,
  logits_table,
  parameter_shapes,
)
from palm_mtf.config import ModelConfig
from palm_mtf.generation.decode.block import (
  add_and_scale,
  attend_to_cache,
  mix_products,
  run_layer,
)
from palm_mtf.model.experts import sum_experts
from palm_mtf.model.positions import (
  alibi_slopes,
  project_distances,
  sines_and_cosines,
)
from palm_mtf.model.projection import read_product, vectors_of
from palm_mtf.model.router import choose
from palm_mtf.ops.xla import without_fusion

# Tensors [batch, key_heads, memory_length, d_kv]: keys of layer 0, values of
# layer 0, keys of layer 1, and so on. Multi-query attention has 1 key head.
Cache = list[tf2.Tensor]


class Decoder(tf2.Module):
  """The forward pass of the model, with weights that `read` returns by name."""

  def __init__(self, model: ModelConfig, read: Callable[[str], np.ndarray]):
    super().__init__("decoder")
    self._model = model
    self._weights = {
      name: tf2.Variable(read(name), trainable=False, name=name)
      for name in parameter_shapes(model)
    }

  def make_empty_cache(
    self, num_rows: tf2.Tensor, memory_length: tf2.Tensor
  ) -> Cache:
    """Returns a cache of zeros for `memory_length` tokens per row."""
    model = self._model
    shape = [num_rows, model.key_heads, memory_length, model.d_kv]
    return [tf2.zeros(shape) for _ in range(2 * model.num_layers)]

  @without_fusion()
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
    described = model_of(model)
    angles = {
      rotary: [
        tf2.gather(x, positions)
        for x in sines_and_cosines(model.sequence_length, rotary)
      ]
      for rotary in described.rotaries
    }
    is_seen = model.has_prefix and num_given is not None
    x = tf2.gather(self._weights["embedding"], tokens) * model.embedding_scale
    if model.positions == "learned":
      x += tf2.gather(self._weights["position_embedding"], positions)
    branch, after = tf2.zeros_like(x), []
    for index, layer in enumerate(described.layers):
      block = _Block(
        model,
        {
          name.removeprefix(f"{layer_name(index)}/"): value
          for name, value in self._weights.items()
        },
        cache[2 * index : 2 * index + 2],
        positions,
        angles.get(layer.rotary, []),
        [num_given] if is_seen else [],
      )
      x, branch = run_layer(layer, block, x, branch)
      after += block.cache
    how = _describe_norm(model, self._weights, "final_norm")
    return add_and_scale(x, [branch], *how)[1], after

  def logits(self, y: tf2.Tensor) -> tf2.Tensor:
    """Returns logits [..., vocab] for the last norm's output [..., d_model]."""
    table = self._weights[logits_table(self._model)]
    y = tf2.einsum("...d,vd->...v", y * self._model.logits_factor, table)
    bias = self._weights.get("logits/bias")
    return y if bias is None else y + bias


def _describe_norm(
  model: ModelConfig, weights: Mapping[str, tf2.Variable], name: str
) -> tuple[NormForm, float, list[tf2.Tensor]]:
  # Returns what a norm computes, its epsilon, and [scale, bias if any].
  form, names = NORMS[model.norm], (f"{name}/scale", f"{name}/bias")
  vectors = [weights[x] for x in names if x in weights]
  if not vectors:  # FINAL_NORM_SCALE = "none": scale by 1
    return form, model.norm_epsilon, [tf2.ones([model.d_model])]
  scale, *bias = vectors
  return form, model.norm_epsilon, [scale + form.scale_offset, *bias]


@dataclasses.dataclass(eq=False)
class _Block:
  """A layer's norms, products and attention, for several tokens per row."""

  model: ModelConfig
  weights: Mapping[str, tf2.Variable]  # {name in a layer: value}
  cache: Cache  # keys and values of this layer
  positions: tf2.Tensor  # [rows, tokens]
  # For rotary positions, sines and cosines of one angle per pair of rotated
  # numbers of a head: [rows, tokens, pairs] each; otherwise [].
  angles: list[tf2.Tensor]
  num_given: list[tf2.Tensor]

  def add_and_norm(self, x, branch, norm):
    how = _describe_norm(self.model, self.weights, norm)
    return add_and_scale(x, branch, *how)

  def mix(self, y, read: Read):
    kernels = [self.weights[part] for part in read.parts]
    rows, tokens = tf2.unstack(tf2.shape(y)[:2])
    joined = [tf2.reshape(x, [y.shape[-1], -1]) for x in kernels]
    wide = tf2.reshape(y, [-1, y.shape[-1]]) @ tf2.concat(joined, 1)
    parts = read_product(
      wide,
      [rows, tokens],
      [x.shape[1:].as_list() for x in kernels],
      read,
      self.model.norm_epsilon,
      self.angles,
      [self.weights[name] for name in vectors_of(read)],
    )
    mixed = mix_products(read, parts, self._attend)
    return {
      branch.output: x for branch, x in zip(read.joined, mixed, strict=True)
    }

  def run_experts(self, y, branch: Branch):
    names = (x.part for x in (*branch.inputs, branch.output))
    router, *kernels = (self.weights[x] for x in names)
    mixer = branch.experts
    bias = [self.weights[ROUTER_BIAS]] if mixer.has_bias else []
    rows = tf2.reshape(y, [-1, y.shape[-1]])
    gates, choice = choose(rows, router, bias, mixer)
    given = gates, choice, tf2.constant(0), kernels, mixer.mlp
    found, _ = sum_experts(rows, *given)
    return tf2.reshape(found, tf2.shape(y))

  def _attend(self, q, k, v, mixer):
    self.cache = [
      self._write(old, new) for old, new in zip(self.cache, (k, v), strict=True)
    ]
    extras = [self.weights[name] for name, _ in mixer.extras]
    if mixer.score_positions == "alibi":
      extras = [tf2.constant(alibi_slopes(self.model.num_heads))]
    if mixer.score_positions == "transformer_xl":
      content_bias, position_bias, kernel = extras
      vectors = project_distances(kernel, self.model.sequence_length)
      extras = [content_bias, position_bias, vectors]
    return attend_to_cache(
      q, *self.cache, self.positions, mixer, extras, self.num_given
    )

  def _write(self, cache, new):
    # `new` is [rows, tokens, key_heads, d_kv], or [rows, tokens, d_kv].
    rows, key_heads, _, d_kv = tf2.unstack(tf2.shape(cache))
    tokens = tf2.shape(new)[1]
    new = tf2.reshape(new, [rows, tokens, key_heads, d_kv])
    new = tf2.transpose(new, [0, 2, 1, 3])
    shape = [rows, key_heads, tokens]
    at = tf2.stack(
      [
        tf2.broadcast_to(tf2.reshape(tf2.range(rows), [-1, 1, 1]), shape),
        tf2.broadcast_to(tf2.reshape(tf2.range(key_heads), [1, -1, 1]), shape),
        tf2.broadcast_to(self.positions[:, tf2.newaxis], shape),
      ],
      -1,
    )
    return tf2.tensor_scatter_nd_update(cache, at, new)

  def project_out(self, branches: Mapping[Projection, tf2.Tensor], others):
    y = sum(others)
    for each, x in branches.items():
      kernel = self.weights[each.part]
      x = tf2.reshape(x, [*tf2.unstack(tf2.shape(x)[:2]), -1])
      y += x @ tf2.reshape(kernel, [-1, kernel.shape[-1]])
      if each.has_bias:
        y += self.weights[each.bias]
    return y
