# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decoding weights on accelerators: one array for the weights of all periods.

A weight's array is [periods, ...], so that a loop runs the layers of a period
(layer_loops.py). Thus more periods make no program larger, and no compilation
longer.

A layout that splits d_model_stored splits the arrays too. A forward pass has
many rows of activations, so it gathers the weights of a layer, as in training.
A decoding step has few rows. If the same mesh axis splits `batch`, the step
moves the rows instead, and each device multiplies all rows by its own part of
the weights. Otherwise a step gathers the weights too.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import (
  layer_name,
  logits_table,
  parameter_dims,
  parse_name,
)
from palm_mtf.executors.xla.layer_loops import find_place, loops_of
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.generation.decode.kernels import Kernel
from palm_mtf.generation.decode.rows import flatten, unflatten
from palm_mtf.generation.decode.weight_maker import WeightMaker
from palm_mtf.generation.decode.weights import DecodeModel, DecodeSettings
from palm_mtf.model.dims import model_dims
from palm_mtf.model.weights import logits_dtype, palm_variables
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.placement import LaidOut
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import SlicedVariable

# Fields of `DecodeModel` with the matrices outside of all layers. Its field
# `vectors` has the other weights outside of all layers.
_TABLES = ("table", "to_logits")
# The device's slices of weights or parameters, by name.
Tensors = Mapping[str, tf.Tensor]


@dataclasses.dataclass(frozen=True)
class SplitKernel(Kernel):
  """A kernel or, if a mesh axis splits its d_model, a device's part of it."""

  place: int  # the dimension of `weights` that is d_model


class StackedWeights:
  """Makes a device's decoding weights, and models that use these weights.

  Names of the first period's weights stand for the same weights of all periods.

  Attributes:
    placement: builds the operations of one device.
    loops: the loops over the layers.
    variables: parameters of first periods and outside of all layers, by name.
    axis: the mesh axis that splits d_model of weights; None if none does.
  """

  def __init__(self, settings: DecodeSettings, placement: XlaPlacement):
    """Finds the model's parameters, and the mesh axis that splits weights."""
    self.placement, self._config = placement, settings.model
    self.loops = loops_of(settings.model)
    dims = model_dims(settings.model, 1, settings.mesh_layout)
    mesh = mtf.Mesh(mtf.Graph(), "pod")
    layers = [i for x in self.loops for i in x.layers]
    palm_variables([mesh], settings.model, dims, layers=[layers])
    self.variables: dict[str, SlicedVariable] = {
      x.name: x for x in mesh.graph.all_variables
    }
    self.axis = None
    if dims.d_model_stored != dims.d_model:
      find_axis = placement.tensor_dimension_to_mesh_axis
      self.axis = find_axis(dims.d_model_stored)
    self._dims = dataclasses.replace(
      dims, d_model_stored=dims.d_model, d_model_residual=dims.d_model
    )
    self._weight_dtype = settings.weight_dtype

  def names_of(self, layer: int | None) -> list[str]:
    """Returns the names in checkpoints of a layer's parameters.

    `layer` is None for the parameters outside of all layers.
    """
    names = parameter_dims(self._config)
    return [x for x in names if parse_name(x).layer == layer]

  def find_variable(self, name: str) -> SlicedVariable:
    """Returns the variable that stands for a parameter of any layer."""
    layer, part = parse_name(name)
    if layer is not None:
      _, first, _ = find_place(self._config, layer)
      name = f"{layer_name(first)}/{part}"
    return self.variables[name]

  def make(self, parameters: Tensors, layer: int | None) -> Tensors:
    """Makes the weights of a layer; for None, those outside of all layers.

    Takes and returns {name: the device's slice}; parameters are float32.
    A weight that joins several kernels has the name of the first kernel.
    Outside of all layers, "table" is the embedding. "to_logits" is the kernel
    of the logits; it is missing if logits are products with the table.
    """

    def read(name: str) -> LaidOut:
      dims = parameter_dims(self._config)[name]
      x = self.placement.LaidOutTensor([parameters[name]])
      return self.gather(x, dims.index("d_model")) if "d_model" in dims else x

    maker = self._make_maker(read)
    found = dict(maker.make_vectors(layer))
    if layer is not None:
      for names, kernel in maker.make_joined_kernels(layer):
        found[names[0]] = self._cut_kernel(kernel, self._find_place(names))
    else:
      found["table"] = self._cut(maker.make_table(), 1)
      if self._has_logits_kernel:
        kernel = maker.make_logits_kernel()
        found["to_logits"] = self._cut_kernel(kernel, 0)
    return {name: x.one_slice for name, x in found.items()}

  def make_model(self, weights: Tensors) -> "StackedModel":
    """Returns a model with the weights that `make` returned.

    `weights` has the device's slices; each weight of a layer is stacked over
    all periods, [periods, ...], under its name in the first period.
    """
    laid_out = {
      name: self.placement.LaidOutTensor([x]) for name, x in weights.items()
    }
    table = self.gather(laid_out["table"], 1)
    dtype = logits_dtype(self._config)
    to_logits = self.placement.slicewise(
      lambda x: SplitKernel(
        tf.cast(x if self._has_logits_kernel else tf.transpose(x), dtype),
        tf.no_op(),
        0,
      ),
      laid_out["to_logits" if self._has_logits_kernel else "table"],
    )
    return StackedModel(
      placement=self.placement,
      config=self._config,
      dims=self._dims,
      table=table,
      to_logits=to_logits,
      stored_table=laid_out["table"],
      vectors={
        name: x
        for name, x in laid_out.items()
        if parse_name(name).layer is None and name not in _TABLES
      },
      kernels={},
      is_packed=False,
      weights=self,
      stacks={
        x: y for x, y in laid_out.items() if parse_name(x).layer is not None
      },
    )

  def take_layer(
    self, stacks: Mapping[str, LaidOut], layer: int, period: tf.Tensor
  ) -> tuple[dict[str, LaidOut], dict[tuple[str, ...], LaidOut]]:
    """Returns `DecodeModel`'s fields `vectors` and `kernels` for one layer.

    `layer` is the layer's number in the first period.
    """
    own = {
      name: self.placement.slicewise(lambda x: x[period], x)
      for name, x in stacks.items()
      if parse_name(name).layer == layer
    }
    maker, kernels = self._make_maker(None), {}
    for names, _ in maker.find_joins(layer):
      place = self._find_place(names)
      kernels[names] = self.placement.slicewise(
        lambda x, place=place: SplitKernel(x, tf.no_op(), place), own[names[0]]
      )
    joined = {names[0] for names in kernels}
    return {x: y for x, y in own.items() if x not in joined}, kernels

  @property
  def _has_logits_kernel(self) -> bool:
    # If False, logits are products with the embedding's table.
    is_quantized = self._weight_dtype != "activation"
    return is_quantized or logits_table(self._config) != "embedding"

  def _make_maker(self, read) -> WeightMaker:
    return WeightMaker(
      self.placement,
      self._config,
      self._dims,
      read,
      self._weight_dtype,
      is_packed=False,
    )

  def _find_place(self, names: Sequence[str]) -> int:
    """Returns which dimension of a joined kernel is d_model: 0 or 1."""
    first, *_ = parameter_dims(self._config)[names[0]]
    return 0 if first == "d_model" else 1

  def gather(self, x: LaidOut, place: int) -> LaidOut:
    """Gathers x along d_model, its dimension `place`."""
    if self.axis is None:
      return x
    return self.placement.allconcat(x, self.axis, place)

  def _cut(self, x: LaidOut, place: int) -> LaidOut:
    """Keeps the device's part of x along d_model; each device has all of x."""
    if self.axis is None:
      return x
    return self.placement.allsplit(x, self.axis, place)

  def _cut_kernel(self, kernel: LaidOut, place: int) -> LaidOut:
    whole = self.placement.slicewise(lambda x: x.weights, kernel)
    return self._cut(whole, place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedModel(DecodeModel):
  """A `DecodeModel` with one array ("stack") per weight, [periods, ...].

  Attributes:
    weights: takes the weights of one layer out of the stacks.
    stacks: {name of a weight in a first period: its stack for all periods}.
    stored_table: the device's part of the embedding.
  """

  weights: StackedWeights
  stacks: Mapping[str, LaidOut]
  stored_table: LaidOut

  has_stacks = True

  @property
  def _rows_axis(self) -> int | None:
    # The mesh axis that splits both weights and rows (sequences), or None. With
    # such an axis, devices exchange weights or rows before a product.
    axes = split_axes(self.placement, [self.dims.batch])
    return self.weights.axis if [self.weights.axis] == axes else None

  def embed(self, tokens):
    """Returns each token's row of the embedding; see `DecodeModel`."""
    impl, axis = self.placement, self._rows_axis
    if axis is None:
      return super().embed(tokens)
    # A device has its part of d_model of all rows of the table. So each device
    # looks up this part for the tokens of all devices.
    own = dataclasses.replace(self, table=self.stored_table)
    x = super(StackedModel, own).embed(impl.allconcat(tokens, axis, 0))
    return impl.alltoall(x, axis, 0, 1)

  def multiply(self, xs, kernel, *, is_step):
    """Multiplies rows by a kernel; devices first exchange rows or kernels."""
    impl, axis = self.placement, self._rows_axis
    (x,), own = xs, kernel.one_slice
    weights, size = impl.LaidOutTensor([own.weights]), own.weights.shape
    # Exchange either rows or weights, whichever have fewer elements.
    if axis is None or x.slice_shape[0] * sum(size) > size.num_elements():
      whole = self.weights.gather(weights, own.place)
      whole = impl.slicewise(lambda x: Kernel(x, tf.no_op()), whole)
      return super().multiply(xs, whole, is_step=is_step)
    dtype = x.one_slice.dtype

    def product(x, w):
      return matmul(tf.cast(x, w.dtype), w, dtype=tf.float32)

    if own.place == 0:
      # Products sum over d_model. Each device has all rows, but only its part
      # of d_model, so its product is one term of the sum.
      terms = impl.slicewise(product, impl.alltoall(x, axis, 1, 0), weights)
      y = impl.reduce_scatter(terms, axis, 0)
      return impl.slicewise(lambda y: tf.cast(y, dtype), y)
    # d_model is the output: each device computes its part of d_model, all rows.
    part = impl.slicewise(
      lambda x, w: tf.cast(product(x, w), dtype),
      impl.allconcat(x, axis, 0),
      weights,
    )
    return impl.alltoall(part, axis, 0, 1)

  def for_each_layer(self, run, carry):
    """Runs a function for each layer, in loops; see `DecodeModel`."""
    for loop in self.weights.loops:

      def run_period(period: tf.Tensor, *flat: tf.Tensor, loop=loop):
        after = unflatten(self.placement, flat, 1)
        for i in loop.layers:
          vectors, kernels = self.weights.take_layer(self.stacks, i, period)
          model = dataclasses.replace(self, vectors=vectors, kernels=kernels)
          after = run(model, i, loop.number(i, period), after)
        return [period + 1, *flatten(after)]

      _, *flat = tf.while_loop(
        lambda period, *unused, loop=loop: period < loop.count,
        run_period,
        [tf.constant(0), *flatten(carry)],
      )
      carry = unflatten(self.placement, flat, 1)
    return carry
