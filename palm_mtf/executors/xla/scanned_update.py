# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The update of all variables, in four phases, as one function of a device.

squares   sum of squares of each gradient                    for each period
scalars   clip factor, and whether the step is finite        once
measure   sums of squares of each variable and its update    for each period
assign    the optimizer's update of the variables            for each period

A period is that of a group of layers (layer_loops.py). A phase needs sums over
all layers from earlier phases, so the phases cannot share one loop.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
from jax import lax

from palm_mtf._tf import mtf
from palm_mtf.executors.xla.device_model import Arrays
from palm_mtf.executors.xla.device_update import DeviceUpdate
from palm_mtf.executors.xla.layer_loops import (
  LayerLoop,
  unstacked,
)
from palm_mtf.executors.xla.parts import DeviceFunction
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.model.dims import model_dims
from palm_mtf.model.weights import palm_variables
from palm_mtf.programs.pod import Update


class _Phases(NamedTuple):
  """The functions of three phases, for the variables of a loop."""

  squares: DeviceFunction
  measure: DeviceFunction
  assign: DeviceFunction


class ScannedUpdate(DeviceUpdate):
  """The update of a pod's variables; the layers' variables are stacked."""

  def __init__(
    self,
    settings: StepSettings,
    placement: XlaPlacement,
    loss_names: Sequence[str],
  ):
    """Builds the graph; `loss_names` are the names of the terms of the loss."""
    optimizer, layout = settings.optimizer, settings.mesh_layout
    self._loops = settings.loops
    periods = {i: x.count for x in self._loops for i in x.layers}
    mesh = mtf.Mesh(mtf.Graph(), "pod")
    batch = layout.axis_size_of("batch")  # any size: no variable has this dim
    dims = model_dims(settings.model, batch, layout)
    palm_variables(
      [mesh], settings.model, dims, settings.seed, [periods], settings.frozen
    )
    trained = list(mesh.graph.trainable_variables)
    super().__init__(placement, trained, loss_names, optimizer, periods)

  def _build_functions(self, update: Update) -> None:
    placement = self._placement
    squares = dict(zip(self._gradients, update.squares, strict=True))
    numbers = [*update.losses.values(), update.is_finite, update.weight]
    self._scalars = DeviceFunction(
      placement,
      [*squares.values(), *self._given.values()],
      list(dict.fromkeys([*update.scalars, *numbers])),
    )
    self._joined = [
      y.value
      for x in update.operations
      if x.is_joined
      for y in x.sums_of_squares
    ]
    by_name = {x.variables[0].name: x for x in update.operations}
    all_sums = [x.value for x in self.sums_of_squares]
    # The phases of each loop; under None, of the variables outside of layers.
    self._phases: dict[LayerLoop | None, _Phases] = {}
    # {metric of a loop: number of periods, which have a value each}
    self._counts: dict[mtf.Tensor, int] = {}
    for loop in (*self._loops, None):
      select = loop.select if loop else unstacked
      own, updates = select(squares), [*select(by_name).values()]
      gradients = [self._gradients[x] for x in own]
      sums = [y.value for x in updates for y in x.sums_of_squares]
      if loop:
        self._counts |= dict.fromkeys([*own.values(), *sums], loop.count)
      known = [*gradients, *update.scalars]
      self._phases[loop] = _Phases(
        squares=DeviceFunction(placement, gradients, [*own.values()]),
        measure=DeviceFunction(placement, known, sums),
        assign=DeviceFunction(placement, [*known, *all_sums], [], updates),
      )

  def num_periods(self, name: str) -> int | None:
    """Returns the number of values of the metric `name`, one per period.

    None for a metric that has one value for all layers.
    """
    return self._counts.get(self.fetched[name])

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
        and `rates`.
    """
    outside = self._phases[None]
    others = unstacked(variables)
    loops = [
      (self._phases[x], x.select(variables), own)
      for x in self._loops
      if (own := x.select(gradients))  # else FROZEN matches all of the loop
    ]
    taken = {self._gradients[x]: y for x, y in unstacked(gradients).items()}
    taken |= {self._given[x]: y for x, y in numbers.items()}

    def map_periods(function, variables, gradients, more=None):
      """Calls a function for each period; stacks the results."""
      more = more or {}

      def run(x):
        variables, gradients, values = x
        given = taken | {self._gradients[x]: y for x, y in gradients.items()}
        given |= zip(more, values, strict=True)
        found, assigned = function(index, given, variables)
        return [*found.values()], assigned

      # JAX takes no dictionaries with mtf.Tensors as keys.
      arrays = variables, gradients, [*more.values()]
      values, assigned = lax.map(run, arrays)
      return dict(zip(function.gives, values, strict=True)), assigned

    found: dict[mtf.Tensor, jax.Array] = {}
    for phases, _, own in loops:
      found |= map_periods(phases.squares, {}, own)[0]
    found |= outside.squares(index, taken, {})[0]
    sums = {x: jax.numpy.sum(y) for x, y in found.items()}
    scalars, _ = self._scalars(index, taken | sums, {})
    taken |= scalars
    measured: dict[mtf.Tensor, jax.Array] = {}
    for phases, layers, own in loops:
      measured |= map_periods(phases.measure, layers, own)[0]
    other, _ = outside.measure(index, taken, others)
    _, state = outside.assign(index, taken | other, others)
    found |= scalars | measured | other
    joined = {x: jax.numpy.sum(measured[x]) for x in self._joined}
    taken |= joined
    for phases, layers, own in loops:
      of_period = {
        x: measured[x] for x in phases.measure.gives if x not in joined
      }
      state |= map_periods(phases.assign, layers, own, of_period)[1]
    state = {**variables, **state}
    return state, {name: found[x] for name, x in self.fetched.items()}
