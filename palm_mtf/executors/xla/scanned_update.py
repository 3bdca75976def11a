# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The update of all variables, in four phases, as a function for each device.

squares   sum of squares of each gradient                    once per period
scalars   clip factor, and whether the step is finite        once per step
measure   sums of squares of each variable and its update    once per period
assign    the optimizer's update of the variables            once per period

A loop runs over periods, which layer_loops.py explains. A phase needs sums over
all layers from earlier phases, so the phases cannot share one loop.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
from jax import lax

from palm_mtf._tf import mtf
from palm_mtf.executors.xla.device_model import Arrays
from palm_mtf.executors.xla.device_update import DeviceUpdate
from palm_mtf.executors.xla.layer_loops import LayerLoop, unstacked
from palm_mtf.executors.xla.parts import DeviceFunction
from palm_mtf.executors.xla.scanned_model import StepSettings
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.model.dims import model_dims
from palm_mtf.model.weights import palm_variables
from palm_mtf.programs.pod import Update

Values = dict[mtf.Tensor, jax.Array]
# Parts of a model: a loop has the variables of its layers, and None stands for
# the variables outside of all layers.
Parts = Sequence[LayerLoop | None]


class _Phases(NamedTuple):
  """The functions of three phases, for the variables of one part."""

  squares: DeviceFunction
  measure: DeviceFunction
  assign: DeviceFunction


class ScannedUpdate(DeviceUpdate):
  """The update of a pod's variables.

  A variable of layers is an array with one slice per period of its loop.
  """

  def __init__(
    self,
    settings: StepSettings,
    placement: XlaPlacement,
    loss_names: Sequence[str],
  ):
    """Builds the graph; `loss_names` are the names of the terms of the loss."""
    optimizer, layout = settings.optimizer, settings.mesh_layout
    self._settings, self._loops = settings, settings.loops
    periods = {i: x.count for x in self._loops for i in x.layers}
    mesh = mtf.Mesh(mtf.Graph(), "pod")
    # Variables do not depend on the batch, so its size may be any that fits.
    batch = layout.axis_size_of("batch")
    dims = model_dims(settings.model, batch, layout)
    palm_variables(
      *([mesh], settings.model, dims, settings.seed, [periods]),
      frozen=settings.frozen,
      loss=settings.loss,
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
    # {part of the model: functions of its phases}
    self._phases: dict[LayerLoop | None, _Phases] = {}
    # {metric with one value per period: number of periods}
    self._counts: dict[mtf.Tensor, int] = {}
    for loop in (*self._loops, None):
      select = _selector(loop)
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
    return self.count(self.fetched[name])

  def parts_in(self, stage: int) -> Parts:
    """Returns the parts of the model that a pipeline stage updates."""
    return [*self._settings.loops_in(stage), *([] if stage else [None])]

  def apply(
    self, variables: Arrays, gradients: Arrays, numbers: Mapping[str, jax.Array]
  ) -> tuple[Arrays, Arrays]:
    """Returns the next variables, and the metrics in `fetched`, on one device.

    Call it inside `jax.shard_map`.

    Args:
      variables: the device's slices, by name.
      gradients: sums over all pods, by the variable's name.
      numbers: scalars by name, [] float32 each: the losses and "weight", summed
        over all pods; and the rates (`DeviceUpdate.rates`).
    """
    parts = [*self._loops, None]
    squares = self.find_squares(gradients, parts)
    known = self.find_scalars(squares, numbers)
    measured = self.measure(variables, gradients, known, parts)
    state = self.assign(variables, gradients, known, measured, parts)
    return state, self.metrics(squares | known | measured)

  def metrics(self, values: Values) -> Arrays:
    """Returns the metrics in `fetched`, by name.

    `values` has the results of `find_squares`, `find_scalars` and `measure`.
    """
    return {name: values[x] for name, x in self.fetched.items()}

  def find_squares(self, gradients: Arrays, parts: Parts) -> Values:
    """Returns the sum of squares of each gradient of `parts`."""
    return self._run(lambda x: x.squares, parts, {}, gradients, {})[0]

  def find_scalars(
    self, squares: Values, numbers: Mapping[str, jax.Array]
  ) -> Values:
    """Returns the scalars that `measure` and `assign` take as `known`.

    `squares` has the results of `find_squares` for all parts of the model, in
    all stages. For `numbers` see `apply`.
    """
    taken = {x: jax.numpy.sum(y) for x, y in squares.items()}
    taken |= {self._given[x]: y for x, y in numbers.items()}
    scalars, _ = self._scalars(taken, {})
    return {self._given[x]: y for x, y in numbers.items()} | scalars

  def measure(
    self, variables: Arrays, gradients: Arrays, known: Values, parts: Parts
  ) -> Values:
    """Returns the sums of squares of variables and of their updates.

    The result has only the variables of `parts`. `known` has the results of
    `find_scalars`; for the other arguments see `apply`.
    """
    given = parts, variables, gradients, known
    return self._run(lambda x: x.measure, *given)[0]

  def assign(
    self,
    variables: Arrays,
    gradients: Arrays,
    known: Values,
    measured: Values,
    parts: Parts,
  ) -> Arrays:
    """Returns `variables`, in which the variables of `parts` are updated.

    `measured` has the results of `measure` for all parts of the model, in all
    stages. For the other arguments see `measure`.
    """
    joined = {x: jax.numpy.sum(measured[x]) for x in self._joined}
    given = parts, variables, gradients, known | joined
    more = {x: y for x, y in measured.items() if x not in joined}
    _, state = self._run(lambda x: x.assign, *given, more)
    return {**variables, **state}

  def squares_in(self, parts: Parts) -> list[mtf.Tensor]:
    """Returns the keys of what `find_squares` returns, in order."""
    return [y for x in parts for y in self._phases[x].squares.gives]

  def measured_in(self, parts: Parts) -> list[mtf.Tensor]:
    """Returns the keys of what `measure` returns, in order."""
    return [y for x in parts for y in self._phases[x].measure.gives]

  def count(self, x: mtf.Tensor) -> int | None:
    """Returns the number of values of x, one per period; None if x is []."""
    return self._counts.get(x)

  def _run(
    self,
    phase: Callable[[_Phases], DeviceFunction],
    parts: Parts,
    variables: Arrays,
    gradients: Arrays,
    known: Values,
    measured: Values | None = None,
  ) -> tuple[Values, Arrays]:
    """Runs a phase of some parts; returns its values and assigned variables."""
    values, assigned = {}, {}
    for loop in parts:
      function, select = phase(self._phases[loop]), _selector(loop)
      own = {self._gradients[x]: y for x, y in select(gradients).items()}
      if loop and not own:  # FROZEN matches every parameter of the loop
        continue
      if measured:
        sums = self._phases[loop].measure.gives
        own |= {x: measured[x] for x in sums if x in measured}
      tensors = [*own]

      def run(state, arrays, function=function, tensors=tensors):
        taken = known | dict(zip(tensors, arrays, strict=True))
        found, changed = function(taken, state)
        return changed, [*found.values()]

      # Carry the variables through the loop, so that each period updates its
      # slices in place. As stacked outputs of the scan, they would be a second
      # copy of all variables.
      def run_period(state, x, run=run):
        period, arrays = x
        own = {
          name: lax.dynamic_index_in_dim(y, period, keepdims=False)
          for name, y in state.items()
        }
        changed, found = run(own, arrays)
        written = {
          name: lax.dynamic_update_index_in_dim(state[name], y, period, 0)
          for name, y in changed.items()
        }
        return {**state, **written}, found

      # Pass lists: JAX accepts no dictionary with mtf.Tensors as keys.
      state, arrays = select(variables), [*own.values()]
      if loop:
        given = jax.numpy.arange(loop.count), arrays
        state, found = lax.scan(run_period, state, given)
      else:
        changed, found = run(state, arrays)
        state = {**state, **changed}
      values |= zip(function.gives, found, strict=True)
      assigned |= state
    return values, assigned


def _selector(loop: LayerLoop | None) -> Callable[[Arrays], Arrays]:
  """Returns a function that selects the variables of a part, by their names."""
  return loop.select if loop else unstacked
