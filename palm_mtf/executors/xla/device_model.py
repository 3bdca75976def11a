# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and its loss on the devices of a pod, before JAX runs its graph."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from palm_mtf._tf import mtf, tf
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.executors.xla.parts import Given
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.model.dropout import DROPOUT_STATE
from palm_mtf.programs.features import Stage
from palm_mtf.programs.loss_function import LossFunction
from palm_mtf.programs.pod import sum_microbatch

Arrays = dict[str, jax.Array]


def compile_function(
  mesh: Mesh,
  function: Callable,
  takes: Sequence[Any],
  gives: Any,
  donated: Sequence[int] = (),
) -> Callable:
  """Returns a function of whole arrays that JAX runs on each device.

  Args:
    function: takes and returns one device's slices.
    takes: how the mesh splits each argument (PartitionSpec), nested like them.
    gives: the same for the results.
    donated: numbers of the arguments whose memory results may reuse.
  """
  mapped = jax.shard_map(
    function, mesh=mesh, in_specs=tuple(takes), out_specs=gives, check_vma=False
  )
  return jax.jit(mapped, donate_argnums=tuple(donated))


class DeviceModel:
  """The graph of a microbatch's loss and gradients.

  Subclasses have `find_gradients` and `find_losses`, which compute one device's
  terms.

  Attributes:
    placement: builds the operations of one device.
    features: {name of a feature: the operation `Given` that takes it}.
    variables: the trained variables.
    reads: names of the variables that the loss reads.
    losses: sums over tokens of the loss's terms and, last, "weight", by name.
    gradients: gradients of the sum of all terms, by the variable's name.
    stream_gradient: gradient of a tensor that a subclass chooses, or None.
    open_axes: {loss or gradient: mesh axes over which `add_up` sums it}.
  """

  def __init__(
    self,
    loss_function: LossFunction,
    mesh_layout: DeviceMesh,
    platform: str,
    *,
    num_stages: int = 1,
    find_stream: Callable[[], mtf.Tensor | None] = lambda: None,
  ):
    """Builds the graph; `platform` is "cpu", "tpu" or "cuda".

    Args:
      num_stages: number of stages that `loss_function` takes; they all are on
        the same mesh.
      find_stream: called after the loss is built; returns a further tensor
        whose gradient is needed, `stream_gradient`, or None.
    """
    self.placement = XlaPlacement(mesh_layout, platform)
    self.mesh = mtf.Mesh(mtf.Graph(), "pod")
    self.features = {
      name: Given(self.mesh, name, x.shape, x.dtype)
      for name, x in loss_function.features.items()
    }
    batch = {name: x.outputs[0] for name, x in self.features.items()}
    self._dropout_state = None
    if loss_function.has_dropout:
      shape = mtf.Shape([DROPOUT_STATE])
      given = Given(self.mesh, "dropout", shape, tf.int32)
      (self._dropout_state,) = given.outputs
    stage = Stage(
      self.mesh, self.placement, {}, [], {}, batch, self._dropout_state, []
    )
    with tf.Graph().as_default():
      self.sums = loss_function.build_sums([stage] * num_stages)
      self.variables = list(self.mesh.graph.trainable_variables)
      stream = find_stream()
      gradients = list(
        sum_microbatch(
          self.sums, self.variables, [] if stream is None else [stream]
        ).gradients
      )
      self.stream_gradient = None if stream is None else gradients.pop()
    self.reads = [x.name for x in self.mesh.graph.all_variables]
    self.losses = {**self.sums.terms, "weight": self.sums.weight}
    names = [x.name for x in self.variables]
    self.gradients = dict(zip(names, gradients, strict=True))
    self.open_axes: dict[mtf.Tensor, list[int]] = {}

  @property
  def parameters(self) -> Sequence[str]:
    """Names of the trained variables in checkpoints, in the model's order."""
    return [x.name for x in self.variables]

  def names_of(self, array: str) -> list[str]:
    """Returns an array's names in checkpoints: one per layer, if stacked."""
    return [array]

  def is_stacked(self, name: str) -> bool:
    """Returns whether the array `name` stacks a variable of several layers."""
    return False

  def stage_of(self, name: str) -> int:
    """Returns the pipeline stage that holds an array."""
    return 0

  def spec(self, x: mtf.Variable | Given) -> PartitionSpec:
    """Returns how the mesh splits the array of a variable or a feature."""
    layout = self.placement.tensor_layout(x.outputs[0].shape)
    axes = [
      None if axis is None else self.placement.shape[axis].name
      for axis in layout.tensor_axis_to_mesh_axis
    ]
    return PartitionSpec(*([None] if self.is_stacked(x.name) else []), *axes)

  def abstract_features(self, mesh: Mesh, *first: int) -> Arrays:
    """Returns dtype, sharding and [*first, rows, ...] of each feature."""
    found: dict[str, Any] = {}
    for name, given in self.features.items():
      (x,) = given.outputs
      spec = PartitionSpec(*(None for _ in first), *self.spec(given))
      found[name] = jax.ShapeDtypeStruct(
        [*first, *x.shape.to_integer_list],
        x.dtype.as_numpy_dtype,
        sharding=NamedSharding(mesh, spec),
      )
    return found

  def add_up(self, losses: Arrays, gradients: Arrays) -> tuple[Arrays, Arrays]:
    """Sums results of `find_gradients` over the devices that hold terms."""

    def add(x: jax.Array, of: mtf.Tensor) -> jax.Array:
      axes = self.open_axes.get(of)
      names = [self.placement.shape[axis].name for axis in axes or ()]
      return lax.psum(x, names) if names else x

    return (
      {name: add(x, self.losses[name]) for name, x in losses.items()},
      {name: add(x, self.gradients[name]) for name, x in gradients.items()},
    )
