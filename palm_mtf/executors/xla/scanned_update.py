# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The update of all variables, in four phases, as one function of a device.

squares   sum of squares of each gradient                    for each layer
scalars   clip factor, and whether the step is finite        once
measure   sums of squares of each variable and its update    for each layer
assign    Adafactor's update of the variables                for each layer

A phase needs sums over all layers from earlier phases, so the phases cannot
share one pass over the layers.

If FROZEN freezes a parameter in only some layers, the phases compute in all
layers, with zeros in place of the missing gradients and slots; then the frozen
layers keep their values.
"""

from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import lax

from palm_mtf._tf import mtf, tf
from palm_mtf.executors.xla.parts import DeviceFunction, Given
from palm_mtf.executors.xla.scanned_model import (
  Arrays,
  StepSettings,
  is_stacked,
)
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.model.dims import model_dims
from palm_mtf.model.weights import palm_variables
from palm_mtf.optim.adafactor import shares_scale
from palm_mtf.programs.loss_function import LossSums
from palm_mtf.programs.pod import Sums, Update, build_update

RATES = ("learning_rate", "one_minus_beta2")


class ScannedUpdate:
  """The update of a pod's variables by Adafactor.

  Attributes:
    variables: the variables of parameters and optimizer slots, by name; those
      of a layer stand for the variables of all layers.
    fetched: the metrics that `apply` returns, by name.
    losses: names of the losses in `fetched`.
    sums_of_squares: a SumOfSquares of each variable and of each update, for RMS
      metrics; the tensors are in `fetched`.
  """

  def __init__(
    self,
    settings: StepSettings,
    placement: XlaPlacement,
    loss_names: Sequence[str],
  ):
    """Builds the graph; `loss_names` are the names of the terms of the loss."""
    optimizer, layout = settings.optimizer, settings.mesh_layout
    one_layer, self._num_layers = settings.one_layer, settings.model.num_layers
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "pod")
    batch = layout.axis_size_of("batch")  # any size: no variable has this dim
    dims = model_dims(one_layer, batch, layout)
    frozen = settings.frozen_arrays
    palm_variables([mesh], one_layer, dims, settings.seed, frozen)
    trained = list(graph.trainable_variables)
    self._constants = {
      x.name for x in graph.all_variables
    } - settings.trained.keys()
    # {parameter that is frozen in only some layers: the other layers}
    self._rows = {
      name: np.array(rows)
      for name, rows in settings.trained.items()
      if is_stacked(name) and len(rows) < self._num_layers
    }

    def give(name: str, shape: mtf.Shape) -> mtf.Tensor:
      return Given(mesh, name, shape, tf.float32).outputs[0]

    self._gradients = {
      x.name: give(f"{x.name}/gradient", x.shape) for x in trained
    }
    scalar = mtf.Shape([])
    self._given = {
      name: give(name, scalar) for name in (*loss_names, "weight", *RATES)
    }
    losses = LossSums(
      {name: self._given[name] for name in loss_names}, self._given["weight"]
    )
    with tf.Graph().as_default():
      update = build_update(
        trained,
        Sums(losses, [*self._gradients.values()]),
        [self._given[x] for x in RATES],
        optimizer,
        meshes=[mesh],
        num_layers={x: len(y) for x, y in settings.trained.items()},
      )
    self.variables = {x.name: x for x in graph.all_variables}
    self.fetched, self.losses = update.fetched, [*update.losses]
    self.sums_of_squares = [
      y for x in update.operations for y in x.sums_of_squares
    ]
    self._build_functions(placement, update)
    self._joined = {
      x.value
      for x in self.sums_of_squares
      if shares_scale(x.variable, optimizer.parameter_scale)
    }

  def _build_functions(self, placement: XlaPlacement, update: Update) -> None:
    squares = dict(zip(self._gradients, update.squares, strict=True))
    numbers = [*update.losses.values(), update.is_finite, update.weight]
    self._scalars = DeviceFunction(
      placement,
      [*squares.values(), *self._given.values()],
      list(dict.fromkeys([*update.scalars, *numbers])),
    )
    # The functions `squares`, `measure` and `assign`: under True for variables
    # of a layer, which JAX maps over layers; under False for other variables.
    self._functions: dict[bool, tuple[DeviceFunction, ...]] = {}
    self._of_layers: set[mtf.Tensor] = set()
    for of_layers in (True, False):
      own = {x: y for x, y in squares.items() if is_stacked(x) == of_layers}
      gradients = [self._gradients[x] for x in own]
      updates = [
        x
        for x in update.operations
        if is_stacked(x.variables[0].name) == of_layers
      ]
      sums = [y.value for x in updates for y in x.sums_of_squares]
      if of_layers:
        self._of_layers |= {*own.values(), *sums}
      known = [*gradients, *update.scalars]
      self._functions[of_layers] = (
        DeviceFunction(placement, gradients, [*own.values()]),
        DeviceFunction(placement, known, sums),
        DeviceFunction(placement, [*known, *sums], [], updates),
      )

  def is_of_layers(self, name: str) -> bool:
    """Returns whether the metric `name` has one value for each layer."""
    return self.fetched[name] in self._of_layers

  def apply(
    self,
    index: jax.Array,
    variables: Arrays,
    gradients: Arrays,
    numbers: Mapping[str, jax.Array],
  ) -> tuple[Arrays, Arrays]:
    """Returns the next variables, and the metrics in `fetched`, on one device.

    Call it inside `jax.shard_map`.

    Args:
      index: the device's number in the mesh, [] int32.
      variables: the device's slices, by name.
      gradients: sums over all pods, by the variable's name.
      numbers: scalars by name: the losses and "weight", summed over all pods;
        "learning_rate" and "one_minus_beta2".
    """
    before = variables
    changing = {x: y for x, y in before.items() if x not in self._constants}
    split = [
      {x: y for x, y in arrays.items() if is_stacked(x) == of_layers}
      for of_layers in (True, False)
      for arrays in (changing, gradients)
    ]
    layers, of_layers, others, of_others = split
    layers = {x: self._widen(x, y) for x, y in layers.items()}
    of_layers = {x: self._widen(x, y) for x, y in of_layers.items()}
    taken = {self._gradients[x]: y for x, y in of_others.items()}
    taken |= {self._given[x]: y for x, y in numbers.items()}

    def of_layer(gradients: Arrays) -> dict[mtf.Tensor, jax.Array]:
      return taken | {self._gradients[x]: y for x, y in gradients.items()}

    squares, measure, assign = self._functions[True]
    squares_of_others, measure_others, assign_others = self._functions[False]

    def map_layers(function, xs, of_none):
      return lax.map(function, xs) if of_layers else of_none

    # Map to lists, because JAX takes no dictionaries with mtf.Tensors as keys.
    mapped = map_layers(
      lambda x: [*squares(index, of_layer(x), {})[0].values()], of_layers, []
    )
    found = dict(zip(squares.gives, mapped, strict=True))
    found |= squares_of_others(index, taken, {})[0]
    sums = {x: jax.numpy.sum(y) for x, y in found.items()}
    scalars, _ = self._scalars(index, taken | sums, {})
    taken |= scalars
    mapped = map_layers(
      lambda x: [*measure(index, of_layer(x[1]), x[0])[0].values()],
      (layers, of_layers),
      [],
    )
    measured = dict(zip(measure.gives, mapped, strict=True))
    for each in self.sums_of_squares:
      if (rows := self._rows.get(each.variable)) is not None:
        is_trained = np.isin(np.arange(self._num_layers), rows)
        x = measured[each.value]
        measured[each.value] = jax.numpy.where(is_trained, x, 0)
    other, _ = measure_others(index, taken, others)
    _, others = assign_others(index, taken | other, others)
    found |= scalars | measured | other
    taken |= {
      x: jax.numpy.sum(y) for x, y in measured.items() if x in self._joined
    }
    own = [x for x in measured if x not in self._joined]

    def run(x):
      layer, gradients, values = x
      of_own = dict(zip(own, values, strict=True))
      return assign(index, of_layer(gradients) | of_own, layer)[1]

    layers = map_layers(
      run, (layers, of_layers, [measured[x] for x in own]), {}
    )
    layers = {x: self._narrow(x, y, before[x]) for x, y in layers.items()}
    metrics = {name: found[x] for name, x in self.fetched.items()}
    return {**before, **layers, **others}, metrics

  def _widen(self, name: str, x: jax.Array) -> jax.Array:
    """Returns a stack of all layers, with zeros in layers that `x` lacks."""
    rows = self._find_rows(name)
    if rows is None or len(x) == self._num_layers:
      return x
    zeros = jax.numpy.zeros((self._num_layers, *x.shape[1:]), x.dtype)
    return zeros.at[rows].set(x)

  def _narrow(self, name: str, x: jax.Array, before: jax.Array) -> jax.Array:
    """Returns the next value of the stack `before`; undoes `_widen`."""
    rows = self._find_rows(name)
    if rows is None:
      return x
    return before.at[rows].set(x[rows]) if name in self._rows else x[rows]

  def _find_rows(self, name: str) -> np.ndarray | None:
    """Returns the trained layers of a stack; None if all layers are trained.

    `name` is the name of a parameter or of its optimizer slot.
    """
    return self._rows.get(name, self._rows.get(name.rpartition("/")[0]))
