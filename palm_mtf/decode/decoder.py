# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model one token at a time, against a cache of keys and values.

`prefill` reads a prompt in one pass and returns its keys and values; `step`
reads one more token of every row and adds to them. Rows may stand at different
positions, and see nothing of each other. Both compute what model/palm.py does,
of the same variables, in the same layouts: each is a few functions of whole
slices between products, with the all-reduces of a split layout between them.

  keys, values   [batch, memory_length, d_kv]          multi-query
                 [batch, heads, memory_length, d_kv]   multi-head

In multi-query attention that is 2 num_layers d_kv numbers a position. Products
are in matmul.py, weights in weights.py, and what lies between the
products in layers.py.
"""

import dataclasses
import functools
from collections.abc import Callable

from palm_mtf._tf import mtf, tf
from palm_mtf.config.model import PalmConfig
from palm_mtf.decode.layers import (
  Widths,
  add_and_norm,
  attend_to_cache,
  attention_parts,
  for_products,
  largest_of_rows,
  normed,
  quantized,
  rows_of_cache,
  split_swiglu,
  written,
)
from palm_mtf.decode.matmul import parts_of, product, rows_of
from palm_mtf.decode.weights import DecodeWeights, product_parts
from palm_mtf.model.attention import slice_functions
from palm_mtf.model.dims import Dims
from palm_mtf.model.layers import local_embedding, sines_and_cosines
from palm_mtf.model.loss import laid_out_cross_entropy
from palm_mtf.model.vocab_padding import laid_out_without_padding
from palm_mtf.ops.slicewise import slice_offset, split_axes

LaidOut = mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor


@dataclasses.dataclass(frozen=True)
class Cache:
  """Keys and values of every layer; see the module's docstring.

  Attributes:
    keys: cached keys of every layer, laid out.
    values: cached values of every layer, laid out.
  """

  keys: list[LaidOut]
  values: list[LaidOut]


class Decoder:
  """Prefill and step of one model on one mesh; builds graph, keeps no state."""

  def __init__(
    self,
    mesh_impl: mtf.MeshImpl,
    config: PalmConfig,
    dims: Dims,
    weights: DecodeWeights,
  ):
    """Readies what all calls share.

    Args:
      mesh_impl: devices and layout.
      config: the architecture.
      dims: its dimensions; those of batch and length are not read.
      weights: weights that `make_weights` returned.
    """
    self._impl = mesh_impl
    self._config = config
    self._dims = dims
    self._weights = weights
    self.num_layers = config.num_layers
    self._dtype = tf.as_dtype(config.activation_dtype)
    self._centered = config.norm == "layer_norm"
    self._widths = Widths(
      heads=self._impl.slice_shape(mtf.Shape([dims.heads]))[0],
      d_kv=config.d_kv,
      is_shared=config.attention == "multi_query",
      joins="out" in product_parts(mesh_impl, config, dims),
      quantizes=weights.is_int8
      and not split_axes(mesh_impl, [dims.heads, dims.d_ff]),
    )

  def cache_shape(self, rows: int, memory_length: int) -> list[int]:
    """Returns the shape of one layer's keys on one device."""
    heads = [] if self._widths.is_shared else [self._widths.heads]
    return [rows, *heads, memory_length, self._config.d_kv]

  def prefill(
    self, tokens: LaidOut, memory_length: int
  ) -> tuple[LaidOut, Cache]:
    """Reads prompts in one pass.

    Args:
      tokens: [batch, length], int32; what follows a row's prompt is not seen
        by it, and its keys and values are written over by `step`.
      memory_length: positions that the cache is made for, at least `length`.

    Returns:
      What `logits` takes, [batch, length, d_model], and the cache.
    """
    rows, length = tokens.tensor_list[0].shape
    cache = Cache([], [])
    sin, cos = (
      tf.constant(x) for x in sines_and_cosines(length, self._config.d_kv)
    )
    is_shared = self._widths.is_shared
    attend, _ = slice_functions(
      "bmk" if is_shared else "bmhk", self._config.d_kv
    )

    def stored(x):
      if not is_shared:
        x = tf.transpose(x, [0, 2, 1, 3])
      free = memory_length - length
      before = [[0, 0]] * (x.shape.rank - 2)
      return tf.pad(x, [*before, [0, free], [0, 0]])

    def attention(layer, wide):
      del layer

      def read(wide):
        q, k, v, *hidden = attention_parts(
          parts_of(wide), (rows, length), self._dtype, sin, cos, self._widths
        )
        out, _ = attend(q, k, v)
        branches = for_products(rows * length, self._widths, out, *hidden)
        return (*map(rows_of, branches), stored(k), stored(v))

      *out, keys, values = self._impl.slicewise(read, wide)
      cache.keys.append(keys)
      cache.values.append(values)
      return out

    flat = self._impl.slicewise(lambda x: tf.reshape(x, [-1]), tokens)
    y = self._blocks(self._embed(flat), attention, packed=False)
    return (
      self._impl.slicewise(lambda y: tf.reshape(y, [rows, length, -1]), y),
      cache,
    )

  def step(
    self, tokens: LaidOut, position: LaidOut, cache: Cache
  ) -> tuple[LaidOut, Cache]:
    """Reads one token of every row.

    Args:
      tokens: [batch], int32.
      position: [batch], int32: the place of each, from 0.
      cache: cache of the tokens before.

    Returns:
      The logits of the next token, [batch, vocab], activation dtype, whole on
      every device that has the row; and the cache with this token.
    """
    cache_shape = cache.keys[0].tensor_list[0].shape
    tables = sines_and_cosines(cache_shape[-2], self._config.d_kv)
    sin, cos = self._impl.slicewise(
      lambda position: tuple(tf.gather(table, position) for table in tables),
      position,
    )
    at = self._impl.slicewise(
      lambda position: rows_of_cache(position, cache_shape), position
    )
    after = Cache([], [])

    def attention(layer, wide):
      def read(wide, keys, values, position, at, sin, cos):
        rows = position.shape[0]
        q, k, v, *hidden = attention_parts(
          parts_of(wide), (rows,), self._dtype, sin, cos, self._widths
        )
        keys, values = written(keys, at, k), written(values, at, v)
        out = attend_to_cache(q, keys, values, position)
        branches = for_products(rows, self._widths, out, *hidden)
        return (*map(rows_of, branches), keys, values)

      *out, keys, values = self._impl.slicewise(
        read,
        wide,
        cache.keys[layer],
        cache.values[layer],
        position,
        at,
        sin,
        cos,
      )
      after.keys.append(keys)
      after.values.append(values)
      return out

    y = self._blocks(self._embed(tokens), attention, packed=True)
    return self.logits(y, packed=True), after

  def logits(self, y: LaidOut, *, packed: bool = False) -> LaidOut:
    """Returns the logits of [batch, d_model]; see `step`.

    Args:
      y: rows of what `prefill` returns.
      packed: whether oneDNN packs the weights (`product`).
    """
    logits = self._product(y, self._weights.to_logits, packed)
    for axis in split_axes(self._impl, [self._dims.vocab]):
      logits = self._impl.allconcat(logits, axis, 1)  # all-gather
    vocab_size = self._config.vocab_size
    if self._dims.vocab.size == vocab_size:
      return logits
    return self._impl.slicewise(lambda x: x[:, :vocab_size], logits)

  def token_loss(self, y: LaidOut, targets: LaidOut) -> LaidOut:
    """Returns -log p of the token after each of some places, [rows] float32.

    Args:
      y: [rows, d_model], of what `prefill` returns.
      targets: [rows], int32.
    """
    logits = self._product(y, self._weights.to_logits, packed=False)
    logits = laid_out_without_padding(
      self._impl, self._dims.vocab, logits, self._config.vocab_size
    )
    token_loss, _ = laid_out_cross_entropy(
      self._impl, self._dims.vocab, logits, targets
    )
    return token_loss

  def _embed(self, tokens: LaidOut) -> LaidOut:
    x = self._impl.slicewise(
      local_embedding,
      slice_offset(self._impl, self._dims.vocab),
      self._weights.table,
      tokens,
    )
    return self._all(x, self._dims.vocab, "SUM")

  def _all(self, x: LaidOut, dim: mtf.Dimension, reduction: str) -> LaidOut:
    """All-reduces over the axis of `dim`, if it is split."""
    axes = split_axes(self._impl, [dim])
    return self._impl.allreduce(x, axes, reduction) if axes else x

  def _product(self, x: LaidOut, kernel: LaidOut, packed: bool) -> LaidOut:
    multiply = functools.partial(product, packed=packed)
    return self._impl.slicewise(multiply, x, kernel)

  def _branches_end(
    self, kernels: dict[str, LaidOut], packed: bool, **branches: LaidOut
  ) -> LaidOut:
    """Returns what branches add to the residual stream, [rows, d_model].

    Args:
      kernels: kernels of one layer.
      packed: whether oneDNN packs the weights (`product`).
      **branches: what the products named so read: "o" and "wo", or "out".
    """
    dims = {"o": self._dims.heads, "wo": self._dims.d_ff}
    dims["out"] = dims["wo"]  # split alike, or it would not be one
    if self._weights.is_int8 and not self._widths.quantizes:
      branches = self._quantized(branches, dims)
    ends = [
      self._product(x, kernels[name], packed) for name, x in branches.items()
    ]
    numbers = [self._impl.slicewise(lambda x: parts_of(x)[0], x) for x in ends]
    sums = [
      self._all(x, dims[name], "SUM")
      for name, x in zip(branches, numbers, strict=True)
    ]
    # They share one scale, if they have any.
    return self._impl.slicewise(
      lambda end, *sums: rows_of(
        (functools.reduce(tf.add, sums), *parts_of(end)[1:])
      ),
      ends[0],
      *sums,
    )

  def _quantized(
    self, branches: dict[str, LaidOut], dims: dict[str, mtf.Dimension]
  ) -> dict[str, LaidOut]:
    """Rounds rows with one scale for the whole sum, as in every layout."""
    largest = [
      self._all(self._impl.slicewise(largest_of_rows, x), dims[name], "MAX")
      for name, x in branches.items()
    ]
    return {
      name: self._impl.slicewise(
        lambda *xs: rows_of(quantized(*xs)), x, *largest
      )
      for name, x in branches.items()
    }

  def _blocks(
    self, x: LaidOut, attention: Callable[..., list[LaidOut]], *, packed: bool
  ) -> LaidOut:
    """Runs all blocks and the final norm on [rows, d_model].

    Args:
      x: embedded tokens.
      attention: (layer, the first product) -> what `for_products` returns.
      packed: whether oneDNN packs the weights (`product`).
    """
    scales = iter(self._weights.scales)
    settings = [self._centered, self._weights.is_int8]

    def after(x, out, is_last=False):
      def add(x, out, scale):
        flags = (self._centered, self._weights.is_int8 and not is_last)
        x, y = add_and_norm(x, parts_of(out), scale, *flags)
        return x, rows_of(y)

      return self._impl.slicewise(add, x, out, next(scales))

    y = self._impl.slicewise(
      lambda *xs: rows_of(normed(*xs, *settings)), x, next(scales)
    )
    for layer, kernels in enumerate(self._weights.kernels):
      end = functools.partial(self._branches_end, kernels, packed)
      is_last = layer == self.num_layers - 1
      if self._config.block == "serial":
        (heads,) = attention(layer, self._product(y, kernels["qkv"], packed))
        x, y = after(x, end(o=heads))
        hidden = self._impl.slicewise(
          lambda wide: rows_of(
            split_swiglu(parts_of(wide), self._dtype, self._widths)
          ),
          self._product(y, kernels["wi"], packed),
        )
        x, y = after(x, end(wo=hidden), is_last)
        continue
      branches = attention(layer, self._product(y, kernels["into"], packed))
      names = ["out"] if self._widths.joins else ["o", "wo"]
      ends = end(**dict(zip(names, branches, strict=True)))
      x, y = after(x, ends, is_last)
    return y
