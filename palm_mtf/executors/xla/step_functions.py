# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs of one pod's devices, which XLA compiles and JAX runs.

  step        gradients of all microbatches of a step, and the update
  gradients   the same gradients; each device returns an equal part of them
  update      the update, from these parts after they are summed over pods
  loss        the loss of a batch

A pod that trains by itself runs `step`. Several pods run `gradients`, exchange
the parts through their hosts, and run `update`.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import sent_dtype
from palm_mtf.executors.xla.device_model import Arrays, compile_function
from palm_mtf.executors.xla.scanned_model import ScannedModel, StepSettings
from palm_mtf.executors.xla.scanned_update import ScannedUpdate
from palm_mtf.executors.xla.whole_model import (
  WholeModel,
  WholeSettings,
  WholeUpdate,
)
from palm_mtf.mesh.slices import pad_to
from palm_mtf.model.dropout import DROPOUT_STATE
from palm_mtf.programs.features import Feature

SETTINGS = (StepSettings, WholeSettings)
REPLICATED = PartitionSpec()


# Largest message between hosts, in bytes, which gRPC counts in 32 bits.
_MAX_BYTES = 2**30


def cut_rows(num_rows: int, num_bytes: int) -> list[slice]:
  """Cuts rows of `num_bytes` into messages of up to 1 GiB, at least one row."""
  share = max(1, _MAX_BYTES // num_bytes)
  return [slice(i, min(i + share, num_rows)) for i in range(0, num_rows, share)]


def join_numbers(values: Iterable[jax.Array]) -> jax.Array:
  """Joins values of any shapes into one vector, float32."""
  flat = [jnp.ravel(x).astype(jnp.float32) for x in values]
  return jnp.concatenate([*flat, jnp.zeros([0])])


class PodStep:
  """The programs of a pod.

  Attributes:
    variables: the trained variables and their optimizer slots, by name. A
      variable of a layer stands for those of all periods (layer_loops.py),
      whose array is [periods, ...].
    parameters: names of the trained variables, in the order of the model.
  """

  def __init__(self, settings: StepSettings | WholeSettings, platform: str):
    """Builds the graphs; `platform` is "cpu", "tpu" or "cuda"."""
    self._settings = settings
    self._num_microbatches = settings.mesh_layout.num_microbatches
    self.model: ScannedModel | WholeModel
    if isinstance(settings, WholeSettings):
      self.model = WholeModel(settings, platform)
    else:
      self.model = ScannedModel(settings, platform)
    self.variables = {x.name: x for x in self.model.variables}
    self.parameters = [*self.variables]
    if settings.optimizer:
      self.update: ScannedUpdate | WholeUpdate
      if isinstance(self.model, WholeModel):
        self.update = WholeUpdate(settings, self.model)
      else:
        self.update = ScannedUpdate(
          settings, self.model.placement, list(self.model.losses)[:-1]
        )
      self.variables = self.update.variables

  def features(self, num_rows: int) -> dict[str, Feature]:
    """Returns dtype and shape of each feature of some rows, by name."""
    found = {}
    for name, given in self.model.features.items():
      (x,) = given.outputs
      rows, *dims = x.shape.dims
      rows = mtf.Dimension(rows.name, num_rows)
      found[name] = Feature(x.dtype, mtf.Shape([rows, *dims]))
    return found

  def names_of(self, name: str) -> list[str]:
    """Returns an array's names in checkpoints: one per period, if stacked."""
    return self.model.names_of(name)

  def shape(self, name: str) -> list[int]:
    """Returns the whole shape of a variable's array, before it is split."""
    return self._stack_shape(name, self.variables[name].shape.to_integer_list)

  def _stack_shape(self, name: str, shape: Sequence[int]) -> list[int]:
    stacked = [len(self.names_of(name))] if self.model.is_stacked(name) else []
    return [*stacked, *shape]

  def arrays_in(self, stage: int) -> list[str]:
    """Returns the names of the arrays that a pipeline stage holds.

    All stages have the same `variables`, but each holds only its own arrays:
    those of its layers and, in stage 0, those outside of all layers.
    """
    return [x for x in self.variables if self.model.stage_of(x) == stage]

  def parameters_in(self, stage: int) -> list[str]:
    """Returns the names of the trained variables of a pipeline stage."""
    own = self.arrays_in(stage)
    return [x for x in self.parameters if x in own]

  def slice_begin(self, name: str, device: int) -> tuple[int, ...]:
    """Returns where a device's slice of a variable begins, per dimension."""
    placement = self.model.placement
    return tuple(placement.slice_begin(self.variables[name].shape, device))

  def build_initial_slices(
    self, array: str, name: str, begins: Sequence[Sequence[int]]
  ) -> list[tf.Tensor]:
    """Builds a host's slices of the initial value of one layer's variable.

    `name` is the variable's name in checkpoints; `array` has a variable of that
    kind for each layer. `begins` says where each slice begins, per dimension.
    """
    variable = self.variables[array]
    size = self.model.placement.slice_shape(variable.shape)
    # Draw the whole value, so that no layout changes the values.
    whole = variable.initializer.full_value(name, variable.sizes)
    whole = pad_to(whole, variable.shape.to_integer_list)
    slices = [tf.slice(whole, begin, size) for begin in begins]
    return [tf.cast(x, variable.slice_dtype) for x in slices]

  def spec(self, name: str) -> PartitionSpec:
    """Returns how the mesh splits the array of a variable."""
    return self.model.spec(self.variables[name])

  @property
  def num_numbers(self) -> dict[str, int]:
    """{metric: how many numbers `step` returns of it: 1, or one per period}."""
    return {x: self.update.num_periods(x) or 1 for x in self.update.fetched}

  def find_number(self, name: str) -> int:
    """Returns the index of a metric in the vector that `step` returns."""
    sizes = self.num_numbers
    return sum(sizes[x] for x in [*sizes][: [*sizes].index(name)])

  def abstract_state(self, mesh: Mesh) -> Arrays:
    """Returns shape, dtype and sharding of each variable's array, by name."""
    return {
      name: jax.ShapeDtypeStruct(
        self.shape(name),
        x.slice_dtype.as_numpy_dtype,
        sharding=NamedSharding(mesh, self.spec(name)),
      )
      for name, x in self.variables.items()
    }

  def abstract_batch(self, mesh: Mesh) -> Arrays:
    """Returns dtype, sharding and [microbatches, rows, ...] of each feature."""
    return self.model.abstract_features(mesh, self._num_microbatches)

  def abstract_numbers(self, mesh: Mesh) -> Arrays:
    """Returns shape and dtype per item of `step`'s `numbers`, for compiling."""
    everywhere = NamedSharding(mesh, REPLICATED)
    return {
      name: jax.ShapeDtypeStruct(shape, dtype, sharding=everywhere)
      for name, shape, dtype in (
        ("rates", [len(self.update.rates)], jnp.float32),
        ("dropout_state", [DROPOUT_STATE.size], jnp.int32),
        ("goes_on", [], jnp.bool_),
      )
    }

  def split(self, state: Mapping[str, Any]) -> tuple[dict, dict]:
    """Returns the items of `state` that a step changes, and the others."""
    frozen = {*self.model.reads}.difference(self.parameters)
    return (
      {x: y for x, y in state.items() if x not in frozen},
      {x: y for x, y in state.items() if x in frozen},
    )

  def step(self, mesh: Mesh) -> Callable[..., tuple[Arrays, jax.Array]]:
    """Returns a function that does a step of a pod.

    The function takes (state, frozen, batch, numbers). It donates `state`, the
    arrays that a step changes; `frozen` has the others (`split`). `batch` has
    the features by name, [microbatches, rows, ...] each. `numbers` has "rates",
    [rates] float32, in the order of `update.rates`; "dropout_state", [4] int32,
    of the first microbatch; and "goes_on", [] bool, false to change no
    variable.

    The function returns the next state, and one vector, [sum of num_numbers]
    float32, with the values named in `num_numbers`, in that order.
    """

    def run(state: Arrays, frozen: Arrays, batch: Arrays, numbers: Arrays):
      sums = self._sum(state | frozen, batch, numbers["dropout_state"])
      return self._update(state, *self.model.add_up(*sums), numbers)

    specs = self._state_specs()
    return compile_function(
      mesh,
      run,
      [*self.split(specs), self._batch_specs(mesh), REPLICATED],
      (self.split(specs)[0], REPLICATED),
      donated=[0],
    )

  def gradients(self, mesh: Mesh) -> Callable[..., tuple[Arrays, jax.Array]]:
    """Returns a function of (state, batch, numbers) that finds gradients.

    For the arguments see `step`; of `numbers`, only "dropout_state" is read,
    and `state` is not donated. The function returns {name of a parameter: its
    gradient, summed over the pod}, in DCN_DTYPE; each gradient is one vector,
    of which each device holds an equal part (padded). It also returns the sums
    of the losses and, last, of the weights, [losses] float32.
    """

    def run(state: Arrays, batch: Arrays, numbers: Arrays):
      losses, gradients = self._sum(state, batch, numbers["dropout_state"])
      losses, _ = self.model.add_up(losses, {})
      parts = {
        name: self.cut(name, x).astype(self.sent_dtype(name))
        for name, x in gradients.items()
      }
      return parts, self._stack(losses)

    return compile_function(
      mesh,
      run,
      [self._state_specs(), self._batch_specs(mesh), REPLICATED],
      (self._each_device(mesh), REPLICATED),
    )

  def update_of_parts(
    self, mesh: Mesh
  ) -> Callable[..., tuple[Arrays, jax.Array]]:
    """Returns a function of (state, parts, losses, numbers), the update.

    `parts` and `losses` are the sums over all pods of what `gradients` returns,
    float32. The function donates `state` and `parts`, and returns like `step`.
    """

    def run(state: Arrays, parts: Arrays, losses: jax.Array, numbers: Arrays):
      gradients = {name: self.join(name, x) for name, x in parts.items()}
      by_name = dict(zip(self.model.losses, losses, strict=True))
      return self._update(state, by_name, gradients, numbers)

    state, _ = self.split(self._state_specs())
    return compile_function(
      mesh,
      run,
      [state, self._each_device(mesh), REPLICATED, REPLICATED],
      (state, REPLICATED),
      donated=[0, 1],
    )

  def loss(self, mesh: Mesh) -> Callable[..., jax.Array]:
    """Returns a function of (variables, batch) that sums a batch's losses.

    `variables` has the arrays that `read` returns. The function returns
    [losses] float32; the last element is the sum of the tokens' weights.
    """

    def run(variables: Arrays, batch: Arrays) -> jax.Array:
      def of_microbatch(unused, rows: Arrays):
        return unused, self.model.find_losses(variables, rows)

      _, losses = lax.scan(of_microbatch, 0, batch)
      sums = {name: jnp.sum(x) for name, x in losses.items()}
      sums, _ = self.model.add_up(sums, {})
      return self._stack(sums)

    return compile_function(
      mesh,
      run,
      [self.read(self._state_specs()), self._batch_specs(mesh)],
      REPLICATED,
    )

  def _state_specs(self) -> dict[str, PartitionSpec]:
    return {name: self.spec(name) for name in self.variables}

  def _batch_specs(self, mesh: Mesh) -> dict[str, PartitionSpec]:
    return {x: y.sharding.spec for x, y in self.abstract_batch(mesh).items()}

  def _each_device(self, mesh: Mesh) -> dict[str, PartitionSpec]:
    # Pods exchange each gradient as a vector, with an equal part per device.
    return dict.fromkeys(self.parameters, PartitionSpec(mesh.axis_names))

  def read(self, state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the items of `state` that the loss reads: no optimizer slots."""
    return {name: state[name] for name in self.model.reads}

  def _stack(self, losses: Arrays) -> jax.Array:
    # Keep the order of the model, because JAX sorts the keys of a dictionary.
    return jnp.stack([losses[name] for name in self.model.losses])

  def _sum(
    self, state: Arrays, batch: Arrays, dropout_state: jax.Array
  ) -> tuple[Arrays, Arrays]:
    """Sums losses and gradients over microbatches, not yet over devices."""
    read = self.read(state)

    def find(rows: Arrays, first_row: int | jax.Array):
      moved = jnp.array([0, 1, 0, 0]) * first_row
      return self.model.find_gradients(read, rows, dropout_state + moved)

    if self._num_microbatches == 1:
      return find({name: x[0] for name, x in batch.items()}, 0)

    def add(sums, microbatch):
      found = find(*microbatch)
      return jax.tree.map(lambda x, y: x + y.astype(x.dtype), sums, found), None

    micro_rows = self._settings.micro_rows
    first_rows = jnp.arange(self._num_microbatches) * micro_rows
    zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, jnp.float32),
      (
        dict.fromkeys(self.model.losses, jnp.zeros([])),
        {name: read[name] for name in self.parameters},
      ),
    )
    sums, _ = lax.scan(add, zeros, (batch, first_rows))
    return sums

  def _update(
    self,
    state: Arrays,
    losses: Arrays,
    gradients: Arrays,
    numbers: Mapping[str, jax.Array],
  ) -> tuple[Arrays, jax.Array]:
    # `goes_on` is false if an earlier step was not finite. A loss that is NaN
    # then keeps this step from changing variables.
    losses = {
      name: jnp.where(numbers["goes_on"], x, jnp.nan)
      for name, x in losses.items()
    }
    rates = dict(zip(self.update.rates, numbers["rates"], strict=True))
    state, found = self.update.apply(state, gradients, losses | rates)
    return state, join_numbers(found[name] for name in self.num_numbers)

  def cut_parts(
    self, names: Sequence[str], num_devices: int
  ) -> list[list[slice]]:
    """Returns, per parameter in `names`, how to cut its gradient into messages.

    A host joins its `num_devices` devices' parts of a gradient into a vector.
    Each slice in the result cuts one message to the other pods from the vector.
    """
    return [
      cut_rows(
        num_devices * self._part_size(name),
        np.dtype(self.sent_dtype(name)).itemsize,
      )
      for name in names
    ]

  def sent_dtype(self, name: str) -> str:
    """Returns the dtype in which pods exchange a parameter's gradient."""
    return sent_dtype(name, self._settings.dcn_dtype)

  def _part_size(self, name: str) -> int:
    """Returns the number of elements in a device's part of a gradient."""
    dims = self.model.placement.shape.dims
    copies = math.prod(dims[i].size for axes in self._axes(name) for i in axes)
    return -(-math.prod(self.slice_shape(name)) // copies)

  def slice_shape(self, name: str) -> list[int]:
    """Returns the shape of a device's slice of a variable's array."""
    size = self.model.placement.slice_shape(self.variables[name].shape)
    return self._stack_shape(name, size)

  def _axes(self, name: str) -> tuple[list[int], list[int]]:
    """Returns two lists of mesh axes, by their numbers.

    Over the axes in the first list, the devices hold partial sums of the
    gradient; over the axes in the second list, they hold equal copies.
    """
    layout = self.model.placement.tensor_layout(self.variables[name].shape)
    split = layout.tensor_axis_to_mesh_axis
    dims = self.model.placement.shape.dims
    free = [i for i, x in enumerate(dims) if i not in split and x.size > 1]
    is_open = self.model.open_axes.get(self.model.gradients[name], ())
    return [i for i in free if i in is_open], [
      i for i in free if i not in is_open
    ]

  def cut(self, name: str, gradient: jax.Array) -> jax.Array:
    """Sums a gradient over the pod; returns the device's part, a vector.

    Along axes whose devices hold equal copies, a device only cuts out its part.
    This comes first, because then the reduce-scatters move fewer bytes.
    """
    dims = self.model.placement.shape.dims
    summed, copied = self._axes(name)
    x = jnp.ravel(gradient)
    parts = math.prod(dims[i].size for i in (*summed, *copied))
    x = jnp.pad(x, [0, -x.size % parts])
    for i in copied:
      size = x.size // dims[i].size
      x = lax.dynamic_slice_in_dim(x, lax.axis_index(dims[i].name) * size, size)
    for i in summed:
      x = lax.psum_scatter(x, dims[i].name, tiled=True)
    return x

  def join(self, name: str, part: jax.Array) -> jax.Array:
    """Gathers the parts of a gradient; undoes `cut`."""
    dims, shape = self.model.placement.shape.dims, self.slice_shape(name)
    summed, copied = self._axes(name)
    for i in reversed([*copied, *summed]):
      part = lax.all_gather(part, dims[i].name, tiled=True)
    return part[: math.prod(shape)].reshape(shape)
