# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Weights for decoding, and products with them, on every device of a mesh."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.block import (
  NORMS,
  ROUTER_BIAS,
  Attention,
  Branch,
  Projection,
  Read,
  model_of,
)
from palm_mtf.architecture.parameters import layer_name
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.generation.decode.kernels import multiply
from palm_mtf.mesh.slices import Slice
from palm_mtf.model.dims import Dims
from palm_mtf.model.experts import sum_experts
from palm_mtf.model.layers import local_embedding
from palm_mtf.model.positions import alibi_slopes
from palm_mtf.model.projection import JoinedColumns, vectors_of
from palm_mtf.model.router import choose
from palm_mtf.model.weights import logits_dtype
from palm_mtf.native import decoding
from palm_mtf.native.adapters import add_adapter
from palm_mtf.ops.placement import LaidOut, Placement
from palm_mtf.ops.slicewise import slice_offset, split_axes

# Takes the logits of rows, [rows, vocab] float32, and the vectors that give
# them, [rows, d_model] float32. Returns logits of a mixture with an index of
# keys (retrieval/keys.py), [rows, vocab] float32.
Mix = Callable[[np.ndarray, np.ndarray], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeSettings:
  """Settings of decoding weights; hosts of accelerators get these as JSON."""

  model: ModelConfig
  mesh_layout: MeshLayout  # the caller has checked it against `model`
  weight_dtype: str
  mix: Mix | None = None  # not on accelerators
  # Whether this machine measures which products by packed kernels are fastest.
  # If not, the CPU's flags choose the products, so that results are the same on
  # all CPUs with these flags.
  is_measured: bool = False


@dataclasses.dataclass(frozen=True)
class LayerWeights:
  """Slices of a layer's parameters, and the operation that makes its weights.

  Loading a checkpoint (generation/inference/sessions.py) assigns the slices of
  one layer, then runs `prepare`, so that memory never holds the float32
  parameters of two layers. Several small layers on hosts count as one. One more
  `LayerWeights` has the parameters outside of the layers.
  """

  slices: Mapping[str, Sequence[Slice]]  # {checkpoint variable: its slices}
  prepare: tf.Operation  # makes the decoding weights, then frees the slices


class JoinedKernel(NamedTuple):
  """Kernels of a layer that are joined into one matrix.

  The matrix has the name of the first kernel, and is [inputs, outputs].
  """

  names: tuple[str, ...]
  # For output kernels (attention's and the MLP's): the names of all kernels
  # whose products are summed. These kernels share int8 scales, because packing
  # them joins them into a matrix with one scale per column. () for input
  # kernels.
  summed: tuple[str, ...]


def joined_kernels(
  config: ModelConfig, layer: int, *, is_packed: bool
) -> list[JoinedKernel]:
  """Returns the kernels of a layer in the order in which a step uses them."""
  found = []
  for prefix, each in model_of(config).layers[layer].all_sums:
    *reads, outputs = (
      tuple(f"{layer_name(layer)}/{prefix}{part}" for part in parts)
      for parts in (*(read.parts for read in each.reads), each.outputs)
    )
    # Join output kernels only if they are packed: a packed product can read
    # inputs from several tensors. For an unpacked kernel, a step would have to
    # join the inputs too, which costs more than a second product.
    joined = [outputs] if is_packed else [(name,) for name in outputs]
    found += [JoinedKernel(names, ()) for names in reads if names]
    found += [JoinedKernel(names, outputs) for names in joined if names]
  return found


@dataclasses.dataclass(frozen=True)
class DecodeModel:
  """Decoding weights of one model on one mesh, and products with them.

  `weights` has these names (`WeightMaker.make`):

  table              embedding, [vocab, d_model], activation dtype
  to_logits          transposed table of the logits, [d_model, vocab]
  first of kernels   matrix that joins these kernels (`JoinedKernel`)
  kernel of experts  all experts' matrices, [experts, inner, outer]; packed
                     ones join wi_gate and wi under the name of the first
  other parameters   scale, bias, table of positions or kernel of a router
  """

  placement: Placement  # devices and layout
  config: ModelConfig
  dims: Dims  # `build_palm` replaces `batch` and `length` by the tokens' sizes
  weights: Mapping[str, LaidOut]
  is_packed: bool  # whether kernels are `PackedKernel`s, for C++ operations
  layers: Sequence[LayerWeights] = ()
  # Number of the adapter that products of prompts add, [] int32; None for none.
  adapter: tf.Tensor | None = None
  mix: Mix | None = None  # applies to the logits of decoding steps

  # Whether a cache has only two tensors, [layers, ...] each (rows.py). True on
  # accelerators, where a loop runs one compiled block for all layers.
  has_stacks = False

  @property
  def is_native(self) -> bool:
    """Whether C++ runs decoding steps, and also chooses their tokens."""
    return self.is_packed and self.mix is None

  @property
  def row_axis(self) -> int:
    """Number of the axis of a cache's tensors along which the rows are."""
    return int(self.has_stacks)

  def take(self, name: str) -> LaidOut:
    """Returns one of `weights`, with all of d_model on each device."""
    return self.weights[name]

  def embed(self, tokens: LaidOut) -> LaidOut:
    """Returns each token's row of the embedding, [rows, d_model]."""
    return self.look_up(self.take("table"), tokens)

  def look_up(self, table: LaidOut, tokens: LaidOut) -> LaidOut:
    """Returns each token's row of a table [vocab, width], as [rows, width]."""
    first = slice_offset(self.placement, self.dims.vocab)
    x = self.placement.slicewise(local_embedding, first, table, tokens)
    # If a layout splits vocab, all-reduce [rows, d_model]: one slice of the
    # table gives a token's row, and the other slices give zeros.
    axes = split_axes(self.placement, [self.dims.vocab])
    x = self.placement.allreduce(x, axes, "SUM")
    scale = self.config.embedding_scale
    return x if scale == 1 else self.placement.slicewise(lambda x: x * scale, x)

  def norm_vectors(self, name: str) -> list[LaidOut]:
    """Returns a norm's scale plus offset, and any bias, [d_model] float32."""
    scale, bias = self.weights[f"{name}/scale"], f"{name}/bias"
    if offset := NORMS[self.config.norm].scale_offset:
      scale = self.placement.slicewise(lambda x: x + offset, scale)
    return [scale, self.weights[bias]] if bias in self.weights else [scale]

  def head_norm_scales(self, layer: str, read: Read) -> list[LaidOut]:
    """Returns scales plus offsets, float32, of the norms of q and k."""
    return [
      self.placement.slicewise(
        lambda x, form=form: x + form.scale_offset,
        self.weights[f"{layer}/{each.norm_scale}"],
      )
      for each in read.projections
      if (form := each.head_norm)
    ]

  def score_extras(self, layer: str, mixer: Attention) -> list[LaidOut]:
    """Returns ALiBi's slopes, or T5's or Transformer-XL's score parameters."""
    if mixer.score_positions == "alibi":
      slopes = tf.constant(alibi_slopes(self.config.num_heads))
      slices = self.placement.make_slices(slopes, mtf.Shape([self.dims.heads]))
      return [self.placement.LaidOutTensor(slices)]
    return [self.weights[f"{layer}/{name}"] for name, _ in mixer.extras]

  def multiply(
    self, xs: Sequence[LaidOut], name: str, *, is_step: bool
  ) -> LaidOut:
    """Multiplies rows by the matrix `name`; returns [rows, outer].

    `xs` is one tensor [rows, inner]; for a packed kernel, `xs` may be several
    tensors, split along `inner`. `is_step` says whether a decoding step
    computes the product: a step has few rows, so other operations are faster.
    """
    adapter = self.adapter
    product = None if adapter is None else self._products.get(name)

    def apply(w, *xs):
      y = multiply(xs, w, is_step=is_step)
      if product is None:
        return y
      return add_adapter(y, xs, adapter, product, w)

    return self.placement.slicewise(apply, self.take(name), *xs)

  @functools.cached_property
  def _products(self) -> dict[str, int]:
    # Returns {name of a matrix: index of its product in a step in C++}.
    layers = range(self.config.num_layers)
    joined = (joined_kernels(self.config, i, is_packed=True) for i in layers)
    names = (each.names[0] for some in joined for each in some)
    return {name: i for i, name in enumerate(names)}

  def columns(self, read: Read, threads: int) -> JoinedColumns:
    """Returns an object that splits a device's joined product into q, k, ...

    `threads` is the number of threads per C++ operation; 0 if XLA computes.
    """
    shapes = [
      self.placement.slice_shape(mtf.Shape(self.dims_of(each.outputs)))
      for each in read.projections
    ]
    return JoinedColumns(shapes, read, self.config.norm_epsilon, threads)

  def dims_of(self, names: Iterable[str]) -> list[mtf.Dimension]:
    """Returns the mtf dimensions that have these names, such as "d_model"."""
    return [getattr(self.dims, name) for name in names]

  def project_vectors(self, layer: str, read: Read) -> list[LaidOut]:
    """Returns biases of products in `read`, and scales of norms of q and k."""
    return [self.weights[f"{layer}/{name}"] for name in vectors_of(read)]

  def project_in(
    self, x: LaidOut, layer: str, read: Read, *, is_step: bool
  ) -> LaidOut:
    """Multiplies x [rows, d_model] by the joined kernel of `read`."""
    return self.multiply([x], f"{layer}/{read.parts[0]}", is_step=is_step)

  def project_out(
    self,
    layer: str,
    branches: Mapping[Projection, LaidOut],
    others: Sequence[LaidOut] = (),
    *,
    is_step: bool,
  ) -> LaidOut:
    """Returns the sum of output projections and `others`, [rows, d_model].

    `branches` is {output projection: its input, [rows, inputs]}.
    """
    add = functools.partial(self.placement.slicewise, tf.add)
    found = []
    if self.is_packed and branches:
      name = f"{layer}/{next(iter(branches)).part}"
      found = [self.multiply([*branches.values()], name, is_step=is_step)]
    elif not self.is_packed:
      sums: dict[tuple[int, ...], list[LaidOut]] = {}
      for each, x in branches.items():
        y = self.multiply([x], f"{layer}/{each.part}", is_step=is_step)
        axes = tuple(split_axes(self.placement, self.dims_of(each.inputs)))
        sums.setdefault(axes, []).append(y)
      # Before the all-reduce, add the products that need the same mesh axes, so
      # that each set of axes takes only one all-reduce of [rows, d_model].
      found = [
        self.placement.allreduce(functools.reduce(add, some), axes, "SUM")
        for axes, some in sums.items()
      ]
    return functools.reduce(add, [*found, *others])

  def run_experts(self, x: LaidOut, layer: str, branch: Branch) -> LaidOut:
    """Returns the sum of the results of each row's experts.

    x and the result are [rows, ..., d_model]. CAPACITY_FACTOR does not apply.
    """
    impl, mixer = self.placement, branch.experts
    inputs = [x.part for x in branch.inputs]
    if self.is_packed:
      inputs = inputs[:2]  # the router, and the name of the joined kernels
    names = [*inputs, branch.output.part]
    names += [ROUTER_BIAS] if mixer.has_bias else []

    def apply(first, x, router, *others):
      kernels = [*others]
      bias = [kernels.pop()] if mixer.has_bias else []
      rows = tf.reshape(x, [-1, x.shape[-1]])
      gates, choice = choose(rows, router, bias, mixer)
      if self.is_packed:
        y = decoding.sum_experts(rows, gates, choice, kernels, mixer)
      else:
        y, _ = sum_experts(rows, gates, choice, first, kernels, mixer.mlp)
      return tf.reshape(y, x.shape)

    given = [self.take(f"{layer}/{name}") for name in names]
    first = slice_offset(impl, self.dims.experts)
    axes = split_axes(impl, [self.dims.experts, self.dims.d_expert])
    moved = {*split_axes(impl, [self.dims.batch])}.intersection(axes)
    for axis in moved:  # experts of the device's rows are on other devices
      x = impl.allconcat(x, axis, 0)
    y = impl.slicewise(apply, first, x, *given)
    for axis in moved:
      y = impl.reduce_scatter(y, axis, 0)
    return impl.allreduce(y, [i for i in axes if i not in moved], "SUM")

  def output_biases(
    self, layer: str, outputs: Iterable[Projection]
  ) -> list[LaidOut]:
    """Returns the biases of output projections, [d_model] float32 each."""
    return [self.weights[f"{layer}/{x.bias}"] for x in outputs if x.has_bias]

  def add_bias(self, x: LaidOut, bias: LaidOut) -> LaidOut:
    """Adds a vector to each row of x."""
    return self.placement.slicewise(
      lambda x, bias: x + tf.cast(bias, x.dtype), x, bias
    )

  def unembed(self, y: LaidOut, *, is_step: bool) -> LaidOut:
    """Returns the logits, [rows, vocab] LOGITS_DTYPE; y is [rows, d_model]."""
    dtype, bias = logits_dtype(self.config), self.weights.get("logits/bias")
    y = self.placement.slicewise(lambda y: tf.cast(y, dtype), y)
    y = self.multiply([y], "to_logits", is_step=is_step)
    return y if bias is None else self.add_bias(y, bias)

  def for_each_layer(
    self,
    run: Callable[["DecodeModel", int, "int | tf.Tensor", list[LaidOut]], list],
    carry: list[LaidOut],
  ) -> list[LaidOut]:
    """Calls `run` per layer, first to last; returns what the last call returns.

    Args:
      run: function of (model, number, layer, tensors). `model` has the layer's
        weights. `layer` is the number of the layer, int or [] int32. `number`
        is the layer under whose names `model` has the weights, and whose
        description (`model_of`) fits: this layer, or an equal earlier one.
        `tensors` are what `run` returned for the previous layer.
      carry: the tensors that `run` takes for the first layer.
    """
    for i in range(self.config.num_layers):
      carry = run(self, i, i, carry)
    return carry

  def make_last_norm(self) -> list[LaidOut]:
    """Returns the last norm's scale and any bias, times the logits' factor."""
    return [
      self.placement.slicewise(lambda x: x * self.config.logits_factor, x)
      for x in self.norm_vectors("final_norm")
    ]
