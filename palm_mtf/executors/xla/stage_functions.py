# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs of one pipeline stage, which XLA compiles and JAX runs.

For each microbatch:

  forward    the stage's layers
  head       last norm, logits and loss, with their gradients (stage 0)
  backward   gradients of the stage's layers

Then, once per step:

  total      sums the gradients over devices; computes their sums of squares
  parts      reduce-scatters the gradients: each device gets an equal part
  join       gathers parts that are summed over pods; computes sums of squares
  measure    computes sums of squares of the variables and their updates
  update     runs the optimizer on the stage's variables

The optimizer needs sums over all stages: of the gradients' squares before
`measure`, and of the results of `measure` before `update`. A run with one pod
uses `total`. With several pods, each pod runs `parts`, the pods exchange the
parts through their hosts, and each pod runs `join`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_mtf._tf import mtf
from palm_mtf.executors.xla.device_model import Arrays, compile_function
from palm_mtf.executors.xla.scanned_model import ScannedModel, StepSettings
from palm_mtf.executors.xla.scanned_update import ScannedUpdate
from palm_mtf.executors.xla.step_functions import (
  REPLICATED,
  PodStep,
  join_numbers,
)


class StageStep:
  """The programs of a stage.

  Between programs, each device keeps its own value of an activation or of a
  gradient: a slice, or a term that is not yet summed over devices. One JAX
  array [devices, ...] holds the values of all devices, split along `devices`.

  Attributes:
    mesh: JAX's mesh of the stage's devices.
    rows: dtype, sharding and [rows, ...] of each feature, by name.
    stage: number of the stage in its pod.
    arrays: names of the variables and optimizer slots that the stage holds.
    gradients: names of the stage's trained variables.
    has_backward: whether the backward pass reaches the stage.
  """

  def __init__(
    self, settings: StepSettings, made: PodStep, mesh: Mesh, stage: int
  ):
    """Makes the programs of the stage with the number `stage`.

    `made` has the graphs of all stages; `mesh` has the devices of this stage.
    """
    assert isinstance(made.model, ScannedModel)
    self._made, self._model, self.mesh = made, made.model, mesh
    self.stage, self._settings = stage, settings
    self.arrays = made.arrays_in(stage)
    self._own = made.model.gradients_in(stage)
    self._of_head = [] if stage else made.model.gradients_of_head
    self.gradients = made.parameters_in(stage)
    self.has_backward = made.model.has_backward(stage)
    self._each = PartitionSpec(mesh.axis_names)
    self._specs = {x: made.spec(x) for x in self.arrays}
    self._read = {x: y for x, y in self._specs.items() if x in made.model.reads}
    self.rows = made.model.abstract_features(mesh)
    self._rows = {x: y.sharding.spec for x, y in self.rows.items()}
    if settings.optimizer:
      assert isinstance(made.update, ScannedUpdate)
      self._optimizer = made.update
      self._parts = made.update.parts_in(stage)

  def abstract_state(self) -> Arrays:
    """Returns shape, dtype and sharding of each array that the stage holds."""
    whole = self._made.abstract_state(self.mesh)
    return {x: whole[x] for x in self.arrays}

  def abstract_stream(self) -> jax.ShapeDtypeStruct:
    """Returns shape and dtype of the residual stream, [devices, ...]."""
    x = self._model.stream
    shape = self._model.placement.slice_shape(x.shape)
    dtype = x.dtype.as_numpy_dtype
    return jax.ShapeDtypeStruct([self.mesh.size, *shape], dtype)

  def count_numbers(self) -> list[int]:
    """Returns the sizes of the vectors rates, losses, squares and measured.

    These are arguments of `update`; the last two join vectors of all stages.
    """
    optimizer = self._optimizer
    sizes = [len(optimizer.rates), len(self._model.losses)]
    for names_in in (optimizer.squares_in, optimizer.measured_in):
      found = self._tensors_in_stages(names_in)
      sizes.append(sum(optimizer.count(x) or 1 for x in found))
    return sizes

  def select_changed(self, arrays: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the items of arrays that an update changes."""
    return self._made.split(arrays)[0]

  def read(self, arrays: Arrays) -> Arrays:
    """Returns the arrays that the passes read, so no optimizer slots."""
    return {x: arrays[x] for x in self._read}

  @functools.cached_property
  def forward(self):
    """Function of (variables, rows, dropout_state, x).

    `x` is the residual stream before the stage, [devices, ...]; None for stage
    0. The function returns the stream after the stage, [devices, ...], and the
    activations that `backward` takes as `kept`.
    """

    def run(variables, rows, dropout_state, x):
      given = variables, rows, dropout_state, _own(x)
      return _of_device(self._model.run_forward(self.stage, *given))

    return self._compile(run, [self._read, self._rows, None, self._each])

  @functools.cached_property
  def head(self):
    """Function of (variables, rows, dropout_state, x, sums).

    `x` is the residual stream after the last stage, [devices, ...]. `sums` has
    the losses and the gradients of the head's variables, summed over the
    earlier microbatches. The function returns the gradient of `x`; the tensors
    that `backward` of stage 0 takes as `of_head`; and `sums` with this
    microbatch added.
    """

    def run(variables, rows, dropout_state, x, sums):
      found = self._model.run_head(variables, rows, dropout_state, _own(x))
      losses, gradients, gradient, of_head = found
      sums = _add(_own(sums), losses | gradients)
      return _of_device((gradient, of_head, sums))

    takes = [self._read, self._rows, None, self._each, self._each]
    return self._compile(run, takes, donated=[4])

  @functools.cached_property
  def backward(self):
    """Function of (variables, rows, dropout_state, kept, of_head, x, sums).

    `x` is the gradient of the residual stream after the stage, [devices, ...].
    Only stage 0 reads `of_head`. `sums` has the gradients of the stage's
    variables, summed over the earlier microbatches. The function returns the
    gradient of the stream before the stage, and `sums` with this microbatch
    added.
    """

    def run(variables, rows, dropout_state, kept, of_head, x, sums):
      given = variables, rows, dropout_state, *_own((kept, x, of_head))
      x, gradients = self._model.run_backward(self.stage, *given)
      return _of_device((x, _add(_own(sums), gradients)))

    takes = [self._read, self._rows, None, *[self._each] * 4]
    return self._compile(run, takes, donated=[6])

  @functools.cached_property
  def infer(self):
    """Function of (variables, rows, x): the stream after the stage."""

    def run(variables, rows, x):
      return _of_device(self._model.infer(self.stage, variables, rows, _own(x)))

    return self._compile(run, [self._read, self._rows, self._each])

  @functools.cached_property
  def infer_head(self):
    """Function of (variables, rows, x): the losses, [losses] float32."""

    def run(variables, rows, x):
      losses = self._model.infer_head(variables, rows, _own(x))
      return self._join_losses(self._model.add_up(losses, {})[0])

    return self._compile(run, [self._read, self._rows, self._each], REPLICATED)

  @functools.cached_property
  def zeros(self):
    """Function of (of_head): zeros, for `sums` before the first microbatch.

    If `of_head`, they are `sums` of `head`; else `sums` of `backward`. Each
    array is [devices, ...] float32.
    """

    def make(of_head: bool) -> Arrays:
      names = self._of_head if of_head else self._own
      shapes = {x: tuple(self._made.slice_shape(x)) for x in names}
      if of_head:
        shapes |= dict.fromkeys(self._model.losses, ())
      count = self.mesh.size
      return {x: jnp.zeros([count, *y]) for x, y in shapes.items()}

    each = NamedSharding(self.mesh, self._each)
    return jax.jit(make, static_argnums=0, out_shardings=each)

  @functools.cached_property
  def total(self):
    """Function of (sums): `sums` of `backward` and, in stage 0, of `head`.

    The function returns the gradients, summed over devices; the losses,
    [losses] float32 in stage 0, else [0]; and the sums of squares of all
    gradients, [squares] float32.
    """

    def run(sums):
      losses, gradients = self._split(_own(sums))
      losses, gradients = self._model.add_up(losses, gradients)
      return gradients, self._join_losses(losses), self._squares(gradients)

    gives = self._gradient_specs(), REPLICATED, REPLICATED
    return self._compile(run, [self._each], gives, donated=[0])

  @functools.cached_property
  def parts(self):
    """Function of (sums), as in `total`: parts of gradients, and the losses.

    Each gradient is one vector, of which each device holds an equal part, in
    DCN_DTYPE (`PodStep.gradients`). The losses are as in `total`.
    """

    def run(sums):
      losses, gradients = self._split(_own(sums))
      losses, _ = self._model.add_up(losses, {})
      made = self._made
      parts = {
        name: made.cut(name, x).astype(made.sent_dtype(name))
        for name, x in gradients.items()
      }
      return parts, self._join_losses(losses)

    gives = self._each, REPLICATED
    return self._compile(run, [self._each], gives, donated=[0])

  @functools.cached_property
  def join(self):
    """Function of (parts): the gradients and their sums of squares.

    `parts` are the results of `parts`, summed over pods, float32. The gradients
    and the sums of squares are as in `total`.
    """

    def run(parts):
      gradients = {name: self._made.join(name, x) for name, x in parts.items()}
      return gradients, self._squares(gradients)

    gives = self._gradient_specs(), REPLICATED
    return self._compile(run, [self._each], gives, donated=[0])

  @functools.cached_property
  def measure(self):
    """Function of (variables, gradients, rates, losses, squares).

    `variables` has the arrays that an update changes. `losses` has the sums
    over all pods, [losses] float32. `squares` joins the gradients' sums of
    squares in all stages, in the order of the stages, [squares] float32. The
    function returns the sums of squares of the stage's variables and of the
    updates of these variables, [sums] float32.
    """

    def run(variables, gradients, *numbers):
      _, known = self._find_known(*numbers)
      given = variables, gradients, known, self._parts
      found = self._optimizer.measure(*given)
      names = self._optimizer.measured_in(self._parts)
      return join_numbers(found[x] for x in names)

    takes = [self._changed, self._gradient_specs(), *[REPLICATED] * 3]
    return self._compile(run, takes, REPLICATED)

  @functools.cached_property
  def update(self):
    """Function of (variables, gradients, rates, losses, squares, measured).

    `measured` joins the results of `measure` in all stages, in the order of the
    stages; for the other arguments see `measure`. The function returns the next
    variables, and the metrics (`PodStep.step`). If a loss or gradient is not
    finite, no variable changes.
    """

    def run(variables, gradients, *numbers):
      *numbers, measured = numbers
      optimizer = self._optimizer
      squares, known = self._find_known(*numbers)
      sums = self._split_numbers(optimizer.measured_in, measured)
      given = variables, gradients, known, sums, self._parts
      changed = optimizer.assign(*given)
      found = optimizer.metrics(squares | known | sums)
      return changed, join_numbers(found[x] for x in self._made.num_numbers)

    takes = [self._changed, self._gradient_specs(), *[REPLICATED] * 4]
    gives = self._changed, REPLICATED
    return self._compile(run, takes, gives, donated=[0])

  @property
  def _changed(self) -> dict[str, PartitionSpec]:
    return self.select_changed(self._specs)

  def _gradient_specs(self) -> dict[str, PartitionSpec]:
    return {x: self._specs[x] for x in self.gradients}

  def _compile(
    self,
    run: Any,
    takes: Sequence[Any],
    gives: Any = None,
    donated: Sequence[int] = (),
  ) -> Any:
    # In `takes`, None marks an argument that is replicated. If `gives` is None,
    # each device returns its own value, in arrays [devices, ...].
    takes = [REPLICATED if x is None else x for x in takes]
    gives = self._each if gives is None else gives
    return compile_function(self.mesh, run, takes, gives, donated)

  def _join_losses(self, losses: Arrays) -> jax.Array:
    names = [x for x in self._model.losses if x in losses]
    return join_numbers(losses[x] for x in names)

  def _split(self, sums: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the losses and the gradients in `sums`."""
    names = self._model.losses
    return (
      {x: y for x, y in sums.items() if x in names},
      {x: y for x, y in sums.items() if x not in names},
    )

  def _squares(self, gradients: Arrays) -> jax.Array:
    found = self._optimizer.find_squares(gradients, self._parts)
    names = self._optimizer.squares_in(self._parts)
    return join_numbers(found[x] for x in names)

  def _find_known(
    self, rates: jax.Array, losses: jax.Array, squares: jax.Array
  ) -> tuple[dict[mtf.Tensor, jax.Array], dict[mtf.Tensor, jax.Array]]:
    """Returns `squares`, split by tensor, and the scalars of the update."""
    optimizer = self._optimizer
    by_tensor = self._split_numbers(optimizer.squares_in, squares)
    numbers = dict(zip(self._model.losses, losses, strict=True))
    numbers |= dict(zip(optimizer.rates, rates, strict=True))
    return by_tensor, optimizer.find_scalars(by_tensor, numbers)

  def _tensors_in_stages(self, names_in: Any) -> list[mtf.Tensor]:
    stages = range(self._settings.mesh_layout.stages)
    parts = (self._optimizer.parts_in(x) for x in stages)
    return [x for y in parts for x in names_in(y)]

  def _split_numbers(
    self, names_in: Any, numbers: jax.Array
  ) -> dict[mtf.Tensor, jax.Array]:
    """Splits a vector that joins values of all stages, in the stages' order.

    `names_in` is `ScannedUpdate.squares_in` or `measured_in`.
    """
    found, begin = {}, 0
    for x in self._tensors_in_stages(names_in):
      count = self._optimizer.count(x)
      values = numbers[begin : begin + (count or 1)]
      found[x] = values if count else values[0]
      begin += count or 1
    return found


def _own(x: Any) -> Any:
  """Removes the dimension `devices`, which has size 1 inside `shard_map`."""
  return jax.tree.map(lambda x: x[0], x)


def _of_device(x: Any) -> Any:
  """Adds the dimension `devices`, with size 1 inside `shard_map`."""
  return jax.tree.map(lambda x: x[jnp.newaxis], x)


def _add(sums: Arrays, terms: Arrays) -> Arrays:
  return {x: y + terms[x].astype(jnp.float32) for x, y in sums.items()}
