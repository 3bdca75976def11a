# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of PaLM and its gradients as one JAX function of a device.

The graph has one block, which stands for the blocks of all layers. The graph's
parts, in the order in which they run:

  0  embedding
  1  block, forward        for each layer, from the first to the last
  2  last norm, logits and loss, with their gradients
  3  block, backward       for each layer, from the last to the first
  4  gradient of the embedding

JAX scans parts 1 and 3 over the layers, so that neither the size of the program
nor the time to compile it grows with the number of layers.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import layer_name
from palm_mtf.config import (
  OPTIMIZERS,
  LossConfig,
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
)
from palm_mtf.executors.xla.parts import DeviceFunction, Given, cut, cut_graph
from palm_mtf.executors.xla.xla_placement import XlaPlacement
from palm_mtf.model.dropout import DROPOUT_STATE
from palm_mtf.programs.features import Stage
from palm_mtf.programs.loss_function import PalmLoss
from palm_mtf.programs.pod import sum_microbatch

_EMBED, _FORWARD, _HEAD, _BACKWARD, _EMBED_GRADIENT = range(5)
_ONE_LAYER = layer_name(0) + "/"

Arrays = dict[str, jax.Array]


def is_stacked(name: str) -> bool:
  """Returns whether the array `name` stacks a variable of all layers."""
  return name.startswith(_ONE_LAYER)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
  """All settings that the training programs of a pod depend on.

  Attributes:
    mesh_layout: axes and layout rules of a pod, which split `model` evenly.
    optimizer: None for a program that only computes losses.
    features: names of the features of every batch.
    num_rows: sequences of a step in one pod, in all microbatches.
    dcn_dtype: dtype in which pods exchange gradients.
    seed: seed of the initial weights and of dropout.
  """

  model: ModelConfig
  mesh_layout: MeshLayout
  optimizer: OptimizerConfig | None = dataclasses.field(
    metadata={"choices": OPTIMIZERS}
  )
  loss: LossConfig
  features: Sequence[str]
  num_rows: int
  dcn_dtype: str
  seed: int

  @property
  def micro_rows(self) -> int:
    """Number of sequences that one pod has in each microbatch."""
    return self.num_rows // self.mesh_layout.num_microbatches


class ScannedModel:
  """Loss and gradients of a microbatch on the devices of a pod.

  The variables of all layers are stacked in one array, [layers, ...], which has
  the name of the first layer's variable.

  Attributes:
    placement: builds the operations of one device.
    features: {name of a feature: the operation `Given` that takes it}.
    variables: the trained variables; those of the first layer stand for the
      variables of all layers.
    losses: sums over tokens of the loss's terms and, last, "weight", by name.
    gradients: gradients of the sum of all terms, by the variable's name.
    open_axes: {loss or gradient: mesh axes over which `add_up` sums it}.
  """

  def __init__(self, settings: StepSettings, platform: str):
    """Builds the graph; `platform` is "cpu", "tpu" or "cuda"."""
    self.placement = XlaPlacement(settings.mesh_layout, platform)
    self._num_layers = settings.model.num_layers
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "pod")
    loss_function = PalmLoss(
      dataclasses.replace(settings.model, num_layers=1),
      settings.mesh_layout,
      settings.loss,
      settings.features,
      num_rows=settings.micro_rows,
      seed=settings.seed,
      pass_on=lambda x, _: cut(x),
    )
    self.features = {
      name: Given(mesh, name, x.shape, x.dtype)
      for name, x in loss_function.features.items()
    }
    batch = {name: x.outputs[0] for name, x in self.features.items()}
    self._dropout_state = None
    if loss_function.has_dropout:
      shape = mtf.Shape([DROPOUT_STATE])
      (self._dropout_state,) = Given(mesh, "dropout", shape, tf.int32).outputs
    stage = Stage(
      mesh, self.placement, {}, [], {}, batch, self._dropout_state, []
    )
    with tf.Graph().as_default():
      losses = loss_function.build_sums([stage])
      self.variables = list(graph.trainable_variables)
      gradients = sum_microbatch(losses, self.variables).gradients
    self.losses = {**losses.terms, "weight": losses.weight}
    names = [x.name for x in self.variables]
    self.gradients = dict(zip(names, gradients, strict=True))
    self._functions, self.open_axes = cut_graph(
      self.placement,
      graph,
      {self.features["inputs"]: _EMBED, losses.weight.operation: _HEAD},
      [*self.losses.values(), *gradients],
      scanned=(_FORWARD, _BACKWARD),
    )
    of_embed, of_forward, of_head, *_ = self._functions
    (self._stream,) = _passed(of_embed, of_forward)
    (self._last,) = _passed(of_forward, of_head)
    # For `find_losses`: parts 1 and 2 of the graph, without the operations and
    # results that only gradients need.
    self._forward, self._head = (
      DeviceFunction(
        self.placement, part.takes, gives, open_axes=self.open_axes
      )
      for part, gives in (
        (of_forward, [self._last]),
        (of_head, [*self.losses.values()]),
      )
    )

  def spec(self, x: mtf.Variable | Given) -> PartitionSpec:
    """Returns how the mesh splits the array of a variable or a feature."""
    layout = self.placement.tensor_layout(x.outputs[0].shape)
    axes = [
      None if axis is None else self.placement.shape[axis].name
      for axis in layout.tensor_axis_to_mesh_axis
    ]
    return PartitionSpec(*([None] if is_stacked(x.name) else []), *axes)

  def find_gradients(
    self, variables: Arrays, batch: Arrays, dropout_state: jax.Array
  ) -> tuple[Arrays, Arrays]:
    """Returns one device's terms of the losses' sums and of their gradients.

    Call this method inside `jax.shard_map`. Then call `add_up`, which adds the
    other devices' terms. `add_up` communicates, so with several microbatches
    first sum their results, and then call `add_up` once.

    Args:
      variables, batch: the device's slices of variables and features, by name.
      dropout_state: [4] int32, which determines the masks: step, number of the
        first sequence in the batch, whether to drop, and how many times dropout
        is applied before the first layer; unused if DROPOUT is 0.
    """
    call = self._caller(batch, dropout_state)
    of_forward, of_head, of_backward = self._functions[1:4]
    layers = {x: y for x, y in variables.items() if is_stacked(x)}
    kept = _passed(of_forward, of_backward)
    (last_gradient,) = _passed(of_head, of_backward)
    (stream_gradient,) = _passed(of_backward, self._functions[_EMBED_GRADIENT])

    def run_forward(x, layer):
      found = call(of_forward, {self._stream: x}, *layer)
      return found[self._last], ([found[x] for x in kept], x)

    numbered = layers, jnp.arange(self._num_layers)
    first = call(self._functions[_EMBED], {}, variables)[self._stream]
    x, of_layers = lax.scan(run_forward, first, numbered)
    values = call(of_head, {self._last: x}, variables)

    def run_backward(gradient, of_layer):
      layer, (found, x) = of_layer
      taken = dict(zip(kept, found, strict=True))
      taken |= {self._stream: x, last_gradient: gradient}
      found = call(of_backward, taken, *layer)
      own = {x: y for x, y in self.gradients.items() if x in layers}
      return found[stream_gradient], {x: found[y] for x, y in own.items()}

    values[stream_gradient], gradients = lax.scan(
      run_backward, values[last_gradient], (numbered, of_layers), reverse=True
    )
    values |= call(self._functions[_EMBED_GRADIENT], values, variables)
    others = self.gradients.keys() - gradients.keys()
    gradients |= {name: values[self.gradients[name]] for name in others}
    return {name: values[x] for name, x in self.losses.items()}, gradients

  def find_losses(self, variables: Arrays, batch: Arrays) -> Arrays:
    """Returns one device's terms of the losses' sums, without dropout.

    `find_gradients` explains the arguments, and how to sum over devices.
    """
    call = self._caller(batch, jnp.array([-1, 0, 0, 0]))
    layers = {x: y for x, y in variables.items() if is_stacked(x)}

    def run(x, layer):
      return call(self._forward, {self._stream: x}, *layer)[self._last], None

    x = call(self._functions[_EMBED], {}, variables)[self._stream]
    x, _ = lax.scan(run, x, (layers, jnp.arange(self._num_layers)))
    values = call(self._head, {self._last: x}, variables)
    return {name: values[x] for name, x in self.losses.items()}

  def _caller(self, batch: Arrays, dropout_state: jax.Array) -> Callable:
    """Returns a function that runs one part of the graph on one device."""
    index = self.placement.find_index()
    given = {x.outputs[0]: batch[name] for name, x in self.features.items()}

    def call(function, taken, variables, layer=0):
      # A block applies dropout twice, and all layers run the same graph. So
      # layer i adds 2 i to the last number of the state, to get other masks.
      places_before = dropout_state + jnp.array([0, 0, 0, 2]) * layer
      state = {self._dropout_state: places_before}
      values, _ = function(index, {**given, **state, **taken}, variables)
      return values

    return call

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


def _passed(giver: DeviceFunction, taker: DeviceFunction) -> list[mtf.Tensor]:
  """Returns the tensors that the part `giver` passes to the part `taker`."""
  return [x for x in taker.takes if x in giver.gives]
