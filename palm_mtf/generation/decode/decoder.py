# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding step: one more token of every row, against cached keys and values.

  keys, values   [batch, memory_length, d_kv]          multi-query
                 [batch, heads, memory_length, d_kv]   multi-head

In multi-query attention that is 2 num_layers d_kv numbers a position. Rows may
stand at different positions.
"""

from collections.abc import Callable

from palm_mtf._tf import tf
from palm_mtf.accounting.architecture import layer_name
from palm_mtf.generation.decode.layers import (
  add_and_norm,
  attend_to_cache,
  cache_rows,
  read_inputs,
  written,
)
from palm_mtf.generation.decode.products import LaidOutRows, Products
from palm_mtf.generation.decode.weights import DecodeWeights, LaidOut
from palm_mtf.model.layers import local_embedding, sines_and_cosines
from palm_mtf.ops.slicewise import slice_offset, split_axes

# A step is the block of model/palm.py for one position. It is written a second
# time because there is so little work in it: Mesh TensorFlow's operations would
# be several calls where this is one.


# Rotated keys and values of each layer, one after the other.
Cache = list[LaidOut]


class Decoder:
  """Builds steps of one model; keeps no state."""

  def __init__(self, weights: DecodeWeights):
    """Readies weights for steps; call it outside of the loop over them."""
    self._impl, self._config = weights.impl, weights.config
    self._weights = weights
    self._products = Products(weights, packed=True)
    self._dtype = tf.as_dtype(self._config.activation_dtype)
    self._last_scale = weights.last_scale()

  def step(
    self, tokens: LaidOut, position: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row.

    Args:
      tokens: [batch], int32.
      position: [batch], int32: place of each token, from 0.
      cache: keys and values of the tokens before; overwritten. It may have more
        rows than there are tokens: those behind are left as they are.

    Returns:
      Logits of the next token, [batch, vocab], whole on every device that has
      the row; and the cache with this token.
    """
    impl, shape = self._impl, cache[0].slice_shape
    num_rows = tokens.slice_shape[0]
    shape = [num_rows, *shape[1:]]
    tables = sines_and_cosines(shape[-2], self._config.d_kv)
    # All layers rotate by the same angles and write to the same rows.
    places = impl.slicewise(
      lambda p: (p, cache_rows(p, shape), *(tf.gather(x, p) for x in tables)),
      position,
    )
    after: Cache = []

    def attend(layer: int, y: LaidOutRows, names: list[str]) -> list[LaidOut]:
      shapes, gated = self._products.shapes(names), len(names) == 5

      def read(keys, values, position, at, sin, cos, *wide):
        q, k, v, *hidden = read_inputs(
          wide, sin.shape[:1], shapes, self._dtype, (sin, cos), gated
        )
        keys, values = written(keys, at, k), written(values, at, v)
        # The first rows of a tensor are a view of it: nothing is copied.
        seen = [
          x if x.shape[0] == num_rows else x[:num_rows] for x in (keys, values)
        ]
        heads = attend_to_cache(q, *seen, position)
        return (keys, values, heads, *hidden)

      wide = self._products.project_in(y, names)
      keys, values, *branches = impl.slicewise(
        read, *cache[2 * layer : 2 * layer + 2], *places, *wide
      )
      after.extend([keys, values])
      return branches

    x, y = self._add_and_norm(self._embed(tokens), {}, f"{layer_name(0)}/norm")
    for layer in range(self._config.num_layers):
      x, y = self._block(layer, x, y, attend)
    return self._products.logits(*y), after

  def _block(
    self,
    layer: int,
    x: LaidOut,
    y: LaidOutRows,
    attend: Callable[..., list[LaidOut]],
  ) -> tuple[LaidOut, LaidOutRows]:
    # x is the residual stream and y its norm, [rows, d_model] each; so are the
    # results, behind the block. A norm is computed with the addition before it,
    # in one call.
    name = layer_name(layer)
    qkv = [f"{name}/attention/{part}" for part in "qkv"]
    gates = [f"{name}/mlp/wi_gate", f"{name}/mlp/wi"]
    is_last = layer == self._config.num_layers - 1
    following = "final_norm" if is_last else f"{layer_name(layer + 1)}/norm"
    if self._config.block == "parallel":
      # One product of five kernels, and SwiGLU in the call that rotates q.
      heads, hidden = attend(layer, y, [*qkv, *gates])
      branches = {f"{name}/attention/o": heads, f"{name}/mlp/wo": hidden}
      return self._add_and_norm(x, branches, following)
    (heads,) = attend(layer, y, qkv)
    branches = {f"{name}/attention/o": heads}
    x, y = self._add_and_norm(x, branches, f"{name}/mlp_norm")
    shapes = self._products.shapes(gates)
    (hidden,) = self._impl.slicewise(
      lambda *wide: read_inputs(
        wide, x.slice_shape[:1], shapes, self._dtype, (), True
      ),
      *self._products.project_in(y, gates),
    )
    return self._add_and_norm(x, {f"{name}/mlp/wo": hidden}, following)

  def _embed(self, tokens: LaidOut) -> LaidOut:
    vocab = self._weights.dims.vocab
    x = self._impl.slicewise(
      local_embedding,
      slice_offset(self._impl, vocab),
      self._weights.table,
      tokens,
    )
    # all-reduce of [rows, d_model] where a layout splits vocab: one slice has
    # the row of a token, the others have zeros.
    return self._impl.allreduce(x, split_axes(self._impl, [vocab]), "SUM")

  def _add_and_norm(
    self, x: LaidOut, branches: dict[str, LaidOut], name: str
  ) -> tuple[LaidOut, LaidOutRows]:
    # `branches` are [rows, inputs] by the name of the kernel that they end in.
    is_last = name == "final_norm"
    centered = self._config.norm == "layer_norm"
    # The product behind the last norm gives the logits, and is never int8.
    quantizes = self._weights.quantizes_rows and not is_last
    x, *y = self._impl.slicewise(
      lambda x, scale, *branch: add_and_norm(
        x, branch, scale, centered, quantizes
      ),
      x,
      self._last_scale if is_last else self._weights.scales[f"{name}/scale"],
      *(self._products.project_out(branches) if branches else ()),
    )
    return x, tuple(y)
