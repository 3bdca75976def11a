# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM: a decoder of parallel blocks (PaLM 2; Chowdhery et al. 2022).

  parallel   y = x + MLP(norm(x)) + Attention(norm(x))
  serial     h = x + Attention(norm(x));   y = h + MLP(mlp_norm(h))

  MLP(x)       = (swish(x wi_gate) * (x wi)) wo
  Attention(x) = causal_attention(rotary(x q), rotary(x k), x v) o
  logits       = final_norm(x) embedding^T / sqrt(d_model)

No kernel and no norm has a bias, and input and output share the embedding. The
names of the variables are the checkpoint's schema. The loss is in loss.py, the
layers' arithmetic in layers.py and attention.py, the dimensions in dims.py, and
what moves where a layout splits d_model, in sharding.py.
"""

import functools

from palm_mtf._tf import mtf, tf
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.parameter_names import layer_name
from palm_mtf.model.attention import causal_attention
from palm_mtf.model.dims import Dims
from palm_mtf.model.dropout import Dropout
from palm_mtf.model.layers import embed, norm, rotary, rotary_tables, swiglu
from palm_mtf.model.remat import recomputed
from palm_mtf.model.sharding import (
  as_residual,
  from_residual,
  gathered,
  gathered_einsum,
)
from palm_mtf.model.vocab_padding import without_padding
from palm_mtf.ops.variables import Fill, Normal, sliced_variable


class Palm:
  """Makes the variables of one model on one mesh and builds its logits."""

  def __init__(
    self,
    mesh: mtf.Mesh,
    config: PalmConfig,
    dims: Dims,
    seed: int,
    dropout: Dropout | None = None,
  ):
    """Readies the tables that all layers share.

    Args:
      mesh: mesh of one pod.
      config: the architecture.
      dims: its dimensions, from `model_dims`.
      seed: seed of the initial weights.
      dropout: masks of a training step; None drops nothing.
    """
    self._mesh = mesh
    self._config = config
    self._dims = dims
    self._seed = seed
    self._dropout = dropout
    self._sin, self._cos = rotary_tables(mesh, dims.length, dims.d_kv)
    self._dtype = tf.as_dtype(config.activation_dtype)

  def logits(
    self, inputs: mtf.Tensor, segments: mtf.Tensor | None = None
  ) -> mtf.Tensor:
    """Returns the logits of the token after each of `inputs`.

    A row may hold several documents, each a segment that sees nothing of the
    others. Positions need not begin anew with each: rotary embedding makes of
    them only differences, and these are the same wherever a document starts.

    Args:
      inputs: [batch, length], int32 in [0, vocab).
      segments: [batch, length], int32: a number for each document, any number
        for padding. None is one document a row.

    Returns:
      [batch, length, vocab], activation dtype.
    """
    dims, config = self._dims, self._config
    embedding = sliced_variable(
      self._mesh,
      "embedding",
      mtf.Shape([dims.vocab, dims.d_model_stored]),
      initializer=Normal(1.0, self._seed),
      activation_dtype=self._dtype,
      sizes=[config.vocab_size, config.d_model],
    )
    x = embed(gathered(embedding, inputs, dims), inputs)
    x = as_residual(self._drop(x, 0), dims)
    for layer in range(config.num_layers):
      block = functools.partial(self._block, segments=segments, layer=layer)
      x = recomputed(block, [x]) if config.remat == "layer" else block(x)
    x = from_residual(x, dims)
    # The scale carries 1/sqrt(d_model), so that it is applied in float32.
    factor = dims.d_model.size**-0.5
    x = norm(x, self._scale("final_norm", x), config.norm, factor)
    # The backward pass begins here: the table is kept for it.
    logits = gathered_einsum(
      x, embedding, [dims.batch, dims.length, dims.vocab], dims, again=False
    )
    return without_padding(logits, config.vocab_size)

  def _block(
    self, x: mtf.Tensor, *, segments: mtf.Tensor | None, layer: int
  ) -> mtf.Tensor:
    name = layer_name(layer)
    y = self._norm(x, f"{name}/norm")
    attention = self._attention(y, segments, f"{name}/attention")
    if self._config.block == "parallel":
      both = attention + self._mlp(y, f"{name}/mlp")
      return self._add(x, both, 2 * layer + 1)
    x = self._add(x, attention, 2 * layer + 1)
    y = self._norm(x, f"{name}/mlp_norm")
    return self._add(x, self._mlp(y, f"{name}/mlp"), 2 * layer + 2)

  def _norm(self, x: mtf.Tensor, name: str) -> mtf.Tensor:
    x = from_residual(x, self._dims)
    return norm(x, self._scale(name, x), self._config.norm)

  def _add(self, x: mtf.Tensor, branch: mtf.Tensor, place: int) -> mtf.Tensor:
    """Adds what a branch computed to the residual stream."""
    return x + as_residual(self._drop(branch, place), self._dims)

  def _drop(self, x: mtf.Tensor, place: int) -> mtf.Tensor:
    return self._dropout(x, place) if self._dropout else x

  def _attention(
    self, x: mtf.Tensor, segments: mtf.Tensor | None, name: str
  ) -> mtf.Tensor:
    d = self._dims
    memory = mtf.rename_dimension(x, "length", "memory_length")
    shared = self._config.attention == "multi_query"
    kv_heads = [] if shared else [d.heads]
    q = self._product(x, f"{name}/q", [d.d_model], [d.heads, d.d_kv])
    k = self._product(memory, f"{name}/k", [d.d_model], [*kv_heads, d.d_kv])
    v = self._product(memory, f"{name}/v", [d.d_model], [*kv_heads, d.d_kv])

    def attend(q: mtf.Tensor, k: mtf.Tensor, v: mtf.Tensor) -> mtf.Tensor:
      q = rotary(q, self._sin, self._cos)
      k = rotary(k, self._sin, self._cos)
      return causal_attention(q, k, v, segments)

    is_recomputed = self._config.remat == "attention"
    out = recomputed(attend, [q, k, v]) if is_recomputed else attend(q, k, v)
    # all-reduce over the axis of `heads`, if they are split
    return self._product(out, f"{name}/o", [d.heads, d.d_kv], [d.d_model])

  def _mlp(self, x: mtf.Tensor, name: str) -> mtf.Tensor:
    d = self._dims
    gate = self._product(x, f"{name}/wi_gate", [d.d_model], [d.d_ff])
    linear = self._product(x, f"{name}/wi", [d.d_model], [d.d_ff])
    # all-reduce over the axis of `d_ff`, if it is split
    return self._product(
      swiglu(gate, linear), f"{name}/wo", [d.d_ff], [d.d_model]
    )

  def _product(
    self,
    x: mtf.Tensor,
    name: str,
    in_dims: list[mtf.Dimension],
    out_dims: list[mtf.Dimension],
  ) -> mtf.Tensor:
    """Multiplies x [..., in_dims] by a new kernel [in_dims, out_dims]."""
    fan_in = mtf.Shape(in_dims).size
    kernel = sliced_variable(
      self._mesh,
      name,
      self._stored(in_dims + out_dims),
      initializer=Normal(fan_in**-0.5, self._seed),
      activation_dtype=self._dtype,
    )
    kept = [dim for dim in x.shape.dims if dim not in in_dims]
    # A block that is computed again gathers its kernels again anyway.
    again = self._config.remat != "layer"
    return gathered_einsum(x, kernel, kept + out_dims, self._dims, again=again)

  def _scale(self, name: str, after: mtf.Tensor) -> mtf.Tensor:
    """Returns the scale of a norm, gathered once `after` is there."""
    scale = sliced_variable(
      self._mesh,
      f"{name}/scale",
      self._stored([self._dims.d_model]),
      initializer=Fill(1.0),
    )
    return gathered(scale, after, self._dims)

  def _stored(self, dims: list[mtf.Dimension]) -> mtf.Shape:
    """Returns the shape of a weight with `dims` as its variable has it."""
    d = self._dims
    return mtf.Shape([d.d_model_stored if x == d.d_model else x for x in dims])
