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
from collections.abc import Mapping

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import (
  RELATIVE,
  layer_name,
  logits_table,
  parameter_dims,
  parse_name,
)
from palm_mtf.executors.xla.layer_loops import find_place, loops_of
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.generation.decode.rows import flatten, unflatten
from palm_mtf.generation.decode.weight_maker import WeightMaker, merging_reader
from palm_mtf.generation.decode.weights import DecodeModel, DecodeSettings
from palm_mtf.model.dims import model_dims
from palm_mtf.model.weights import logits_dtype, palm_variables
from palm_mtf.ops.matmul import matmul
from palm_mtf.ops.placement import LaidOut
from palm_mtf.ops.slicewise import split_axes
from palm_mtf.ops.variables import SlicedVariable

# The device's slices of weights or parameters, by name.
Tensors = Mapping[str, tf.Tensor]


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
    self.placement, self._config = placement, settings.model.merged
    self._adapted = settings.model
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
    names = parameter_dims(self._adapted)
    return [x for x in names if parse_name(x).layer == layer]

  def find_variable(self, name: str) -> SlicedVariable:
    """Returns the variable that stands for a parameter of any layer."""
    layer, part = parse_name(name)
    if layer is not None:
      _, first, _ = find_place(self.loops, layer)
      name = f"{layer_name(first)}/{part}"
    return self.variables[name]

  def make(self, parameters: Tensors, layer: int | None) -> Tensors:
    """Makes the weights of a layer; for None, those outside of all layers.

    Takes and returns {name: the device's slice}; parameters are float32. For
    the names of weights see `DecodeModel`; "to_logits" is missing if logits are
    products with the table.
    """

    def read(name: str) -> LaidOut:
      x = self.placement.LaidOutTensor([parameters[name]])
      dims = self._stored_dims(name)
      if "d_model_stored" not in dims:
        return x
      return self.gather(x, dims.index("d_model_stored"))

    of_model = self.placement, self._adapted, self._dims
    merged = merging_reader(*of_model, read)
    given = self.placement, self._config, self._dims, merged
    found = WeightMaker(*given, self._weight_dtype, products=None).make(layer)
    if not self._has_logits_kernel:
      found.pop("to_logits", None)
    return {
      name: self._cut(x, name).tensor_list[0] for name, x in found.items()
    }

  def make_model(self, weights: Tensors) -> "StackedModel":
    """Returns a model with the weights that `make` returned.

    `weights` has the device's slices; each weight of a layer is stacked over
    all periods, [periods, ...], under its name in the first period.
    """
    if not self._has_logits_kernel:
      table = tf.transpose(weights["table"])
      to_logits = tf.cast(table, logits_dtype(self._config))
      weights = {**weights, "to_logits": to_logits}
    laid_out = {
      name: self.placement.LaidOutTensor([x]) for name, x in weights.items()
    }
    return StackedModel(
      placement=self.placement,
      config=self._config,
      dims=self._dims,
      weights=laid_out,
      is_packed=False,
      stacked=self,
      table=self.gather(laid_out["table"], 1),
    )

  def find_place(self, name: str) -> int | None:
    """Returns which dimension of a matrix is d_model; None for other weights.

    If a mesh axis splits weights, each device has its part of this dimension.
    """
    if name in ("table", "to_logits"):
      return int(name == "table")
    parameter = parse_name(name)
    if not parameter.is_kernel or parameter.part == RELATIVE:
      return None
    dims = self._stored_dims(name)
    if not parameter.is_expert:
      return int(dims[0] != "d_model_stored")  # the kernel is a matrix
    is_split = "d_model_stored" in dims
    return dims.index("d_model_stored") if is_split else None

  def _stored_dims(self, name: str) -> tuple[str, ...]:
    return self._dims.layout.stored(parameter_dims(self._adapted)[name])

  @property
  def _has_logits_kernel(self) -> bool:
    # If False, logits are products with the embedding's table.
    is_quantized = self._weight_dtype != "activation"
    return is_quantized or logits_table(self._config) != "embedding"

  def gather(self, x: LaidOut, place: int) -> LaidOut:
    """Gathers x along d_model, its dimension `place`."""
    if self.axis is None:
      return x
    return self.placement.allconcat(x, self.axis, place)

  def _cut(self, x: LaidOut, name: str) -> LaidOut:
    """Keeps the device's part of a matrix; each device has all of x."""
    place = self.find_place(name)
    if self.axis is None or place is None:
      return x
    return self.placement.allsplit(x, self.axis, place)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StackedModel(DecodeModel):
  """A `DecodeModel` with one array ("stack") per weight, [periods, ...]."""

  placement: XlaPlacement
  stacked: StackedWeights  # where the weights are from
  table: LaidOut  # all of the embedding, gathered once for all steps of a loop

  has_stacks = True

  @property
  def _rows_axis(self) -> int | None:
    # The mesh axis that splits both weights and rows (sequences), or None. With
    # such an axis, devices exchange weights or rows before a product.
    axes = split_axes(self.placement, [self.dims.batch])
    return self.stacked.axis if [self.stacked.axis] == axes else None

  def take(self, name):
    """Gathers a weight along d_model; see `DecodeModel`."""
    if name == "table":
      return self.table
    place, own = self.stacked.find_place(name), self.weights[name]
    return own if place is None else self.stacked.gather(own, place)

  def embed(self, tokens):
    """Returns each token's row of the embedding; see `DecodeModel`."""
    impl, axis = self.placement, self._rows_axis
    if axis is None:
      return super().embed(tokens)
    # A device has its part of d_model of all rows of the table. So each device
    # looks up this part for the tokens of all devices.
    x = self.look_up(self.weights["table"], impl.allconcat(tokens, axis, 0))
    return impl.alltoall(x, axis, 0, 1)

  def multiply(self, xs, name, *, is_step):
    """Multiplies rows by a matrix; devices first exchange rows or matrices."""
    impl, axis = self.placement, self._rows_axis
    (x,), weights = xs, self.weights[name]
    size = weights.tensor_list[0].shape
    # Exchange either rows or weights, whichever have fewer elements.
    if axis is None or x.slice_shape[0] * sum(size) > size.num_elements():
      return super().multiply(xs, name, is_step=is_step)
    dtype = x.one_slice.dtype

    def product(x, w):
      return matmul(tf.cast(x, w.dtype), w, dtype=tf.float32)

    if self.stacked.find_place(name) == 0:
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
    for loop in self.stacked.loops:

      def run_period(period: tf.Tensor, *flat: tf.Tensor, loop=loop):
        after = unflatten(self.placement, flat, 1)
        for i in loop.layers:
          own = {
            name: self.placement.slicewise(lambda x: x[period], x)
            for name, x in self.weights.items()
            if parse_name(name).layer == i
          }
          model = dataclasses.replace(self, weights=own)
          after = run(model, i, loop.number(i, period), after)
        return [period + 1, *flatten(after)]

      _, *flat = tf.while_loop(
        lambda period, *unused, loop=loop: period < loop.count,
        run_period,
        [tf.constant(0), *flatten(carry)],
      )
      carry = unflatten(self.placement, flat, 1)
    return carry
