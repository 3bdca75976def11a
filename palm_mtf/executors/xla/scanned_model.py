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
nor the time to compile it grows with the number of layers. The backward pass
ends at the lowest layer with a trained parameter. If FROZEN freezes different
parameters in different layers, part 3 has one scan for each run of layers that
train the same parameters, so each layer computes only the gradients it needs.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import (
  first_in_backward,
  layer_name,
  name_in_layer_0,
  parameter_dims,
  parameters_of,
  parse_name,
  user_name,
)
from palm_mtf.config import AdafactorConfig, MeshLayout, ModelConfig
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
    features: names of the features of every batch.
    num_rows: sequences of a step in one pod, in all microbatches.
    dcn_dtype: dtype in which pods exchange gradients.
    seed: seed of the initial weights and of dropout.
    frozen: FROZEN, patterns of parameters that are not trained.
  """

  model: ModelConfig
  mesh_layout: MeshLayout
  optimizer: AdafactorConfig
  features: Sequence[str]
  num_rows: int
  dcn_dtype: str
  seed: int
  frozen: Sequence[str] = ()

  @functools.cached_property
  def trained(self) -> dict[str, list[int]]:
    """{array of trained parameters: their layers; [0] outside the layers}."""
    found: dict[str, list[int]] = {}
    for x in parameters_of(self.model, tuple(self.frozen)):
      if x.is_trained:
        layer = parse_name(x.name).layer or 0
        found.setdefault(name_in_layer_0(x.name), []).append(layer)
    return found

  @property
  def one_layer(self) -> ModelConfig:
    """The model of the graph, whose layer stands for all layers."""
    return dataclasses.replace(self.model, num_layers=1)

  @property
  def frozen_arrays(self) -> list[str]:
    """FROZEN for `one_layer`: the arrays of which no layer is trained."""
    names = parameter_dims(self.one_layer)
    return [user_name(x) for x in names if x not in self.trained]

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
    weights: the variables of all parameters; those of the first layer stand for
      the variables of all layers.
    variables: those of `weights` that are trained in at least one layer.
    losses: sums over tokens of the loss's terms and, last, "weight", by name.
    gradients: gradients of the sum of all terms, by the name of a variable in
      `variables`.
    open_axes: {loss or gradient: mesh axes over which `add_up` sums it}.
  """

  def __init__(self, settings: StepSettings, platform: str):
    """Builds the graph; `platform` is "cpu", "tpu" or "cuda"."""
    self.placement = XlaPlacement(settings.mesh_layout, platform)
    self._num_layers = settings.model.num_layers
    graph = mtf.Graph()
    mesh = mtf.Mesh(graph, "pod")
    passed: list[mtf.Tensor] = []

    def pass_on(x: mtf.Tensor, unused_mesh: mtf.Mesh) -> mtf.Tensor:
      passed.append(x)
      return cut(x)

    loss_function = PalmLoss(
      settings.one_layer,
      settings.mesh_layout,
      settings.optimizer,
      settings.features,
      num_rows=settings.micro_rows,
      seed=settings.seed,
      frozen=settings.frozen_arrays,
      pass_on=pass_on,
    )
    self.features = {
      name: Given(mesh, name, x.shape, x.dtype)
      for name, x in loss_function.features.items()
    }
    batch = {name: x.outputs[0] for name, x in self.features.items()}
    self._dropout_state = None
    if settings.optimizer.dropout:
      shape = mtf.Shape([DROPOUT_STATE])
      (self._dropout_state,) = Given(mesh, "dropout", shape, tf.int32).outputs
    stage = Stage(
      mesh, self.placement, {}, [], {}, batch, self._dropout_state, []
    )
    with tf.Graph().as_default():
      losses = loss_function.build_sums([stage])
      self.weights = list(graph.all_variables)
      self.variables = list(graph.trainable_variables)
      # The gradient of the first layer's input goes on to the layer before it.
      *gradients, of_stream = sum_microbatch(
        losses, self.variables, passed[:1]
      ).gradients
    self.losses = {**losses.terms, "weight": losses.weight}
    names = [x.name for x in self.variables]
    self.gradients = dict(zip(names, gradients, strict=True))
    frozen = tuple(settings.frozen)
    self._first = first_in_backward(settings.model, frozen)
    self._trains_embedding = not {"embedding", "position_embedding"}.isdisjoint(
      settings.trained
    )
    self._functions, self.open_axes = cut_graph(
      self.placement,
      graph,
      {self.features["inputs"]: _EMBED, losses.weight.operation: _HEAD},
      [
        *self.losses.values(),
        *gradients,
        *([] if self._trains_embedding else [of_stream]),
      ],
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
    self._segments = self._find_segments(settings.trained)

  def _find_segments(
    self, trained: dict[str, list[int]]
  ) -> list[tuple[int, int, DeviceFunction, list[str]]]:
    """Returns the runs of layers whose backward passes are alike, in order.

    A run is: its first layer, the layer after its last layer, their backward
    pass, and the names of the variables whose gradients it computes.
    """
    of_backward, of_embed_gradient = self._functions[_BACKWARD:]
    own = [x for x in self.gradients if is_stacked(x)]
    layers = range(self._first, self._num_layers)
    runs = itertools.groupby(
      layers, key=lambda i: [x for x in own if i in trained[x]]
    )
    segments = []
    for names, run in runs:
      function, numbers = of_backward, list(run)
      if names != own:
        gives = _passed(of_backward, of_embed_gradient)
        function = DeviceFunction(
          self.placement,
          of_backward.takes,
          [*gives, *(self.gradients[x] for x in names)],
          open_axes=self.open_axes,
          in_scan=True,
        )
      segments.append((numbers[0], numbers[-1] + 1, function, names))
    return segments

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

    The gradient of a stack is [layers in which it is trained, ...]. Call this
    method inside `jax.shard_map`. Then call `add_up`, which adds the other
    devices' terms. `add_up` communicates, so with several microbatches
    first sum their results, and then call `add_up` once.

    Args:
      variables, batch: the device's slices of variables and features, by name.
      dropout_state: [4] int32, which determines the masks: step, number of the
        first sequence in the batch, whether to drop, and how many times dropout
        is applied before the first layer; unused if DROPOUT is 0.
    """
    call = self._caller(batch, dropout_state)
    of_forward, of_head, of_backward, of_embed_gradient = self._functions[1:]
    layers = {x: y for x, y in variables.items() if is_stacked(x)}
    kept = _passed(of_forward, of_backward)
    (last_gradient,) = _passed(of_head, of_backward)
    (stream_gradient,) = _passed(of_backward, of_embed_gradient)

    def run_forward(x, of_layer):
      found = call(of_forward, {self._stream: x}, *of_layer[0])
      return found[self._last], ([found[x] for x in kept], x)

    x = call(self._functions[_EMBED], {}, variables)[self._stream]
    of_layers: Any = ()
    if self._first:  # no backward pass reads what these layers compute
      x = self._run_forward(call, x, layers, self._first)
    if self._segments:
      x, of_layers = self._scan(run_forward, x, layers, self._first, None)
    values = call(of_head, {self._last: x}, variables)
    gradient = values[last_gradient]
    found_gradients: dict[str, list[jax.Array]] = {}
    for begin, end, function, names in reversed(self._segments):

      def run_backward(gradient, of_layer, function=function, names=names):
        layer, (found, x) = of_layer
        taken = dict(zip(kept, found, strict=True))
        taken |= {self._stream: x, last_gradient: gradient}
        found = call(function, taken, *layer)
        own = {x: found[self.gradients[x]] for x in names}
        return found[stream_gradient], own

      gradient, found = self._scan(
        run_backward, gradient, layers, begin, end, of_layers, reverse=True
      )
      for name, x in found.items():
        found_gradients.setdefault(name, []).insert(0, x)
    gradients = {
      name: xs[0] if len(xs) == 1 else jnp.concatenate(xs)
      for name, xs in found_gradients.items()
    }
    if self._trains_embedding:
      values[stream_gradient] = gradient
      values |= call(of_embed_gradient, values, variables)
    others = self.gradients.keys() - gradients.keys()
    gradients |= {name: values[self.gradients[name]] for name in others}
    return {name: values[x] for name, x in self.losses.items()}, gradients

  def find_losses(self, variables: Arrays, batch: Arrays) -> Arrays:
    """Returns one device's terms of the losses' sums, without dropout.

    `find_gradients` explains the arguments, and how to sum over devices.
    """
    call = self._caller(batch, jnp.array([-1, 0, 0, 0]))
    layers = {x: y for x, y in variables.items() if is_stacked(x)}
    x = call(self._functions[_EMBED], {}, variables)[self._stream]
    x = self._run_forward(call, x, layers, self._num_layers)
    values = call(self._head, {self._last: x}, variables)
    return {name: values[x] for name, x in self.losses.items()}

  def _run_forward(
    self, call: Callable, x: jax.Array, layers: Arrays, end: int
  ) -> jax.Array:
    """Runs the layers before `end`; keeps nothing for a backward pass."""

    def run(x, of_layer):
      values = call(self._forward, {self._stream: x}, *of_layer[0])
      return values[self._last], None

    return self._scan(run, x, layers, 0, end)[0]

  def _scan(
    self,
    run: Callable,
    carry: Any,
    layers: Arrays,
    begin: int,
    end: int | None,
    kept: Any = (),
    *,
    reverse: bool = False,
  ) -> tuple[Any, Any]:
    """Scans `run` over layers: all from `begin`, or those before `end`.

    `run` takes the carry and ((weights of a layer, its number), its `kept`).
    `kept` has stacks of values that the forward pass kept of each layer that
    the backward pass visits.
    """
    numbers = jnp.arange(begin, end or self._num_layers)
    if len(numbers) == self._num_layers:
      return lax.scan(run, carry, ((layers, numbers), kept), reverse=reverse)

    # Index the stacks in the loop, because slices of them would be copies.
    def run_layer(carry, i):
      layer = _take(layers, i), i
      return run(carry, (layer, _take(kept, i - self._first)))

    return lax.scan(run_layer, carry, numbers, reverse=reverse)

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


def _take(stacks: Any, i: jax.Array) -> Any:
  """Returns row `i` of each of `stacks`."""
  return jax.tree.map(
    lambda x: lax.dynamic_index_in_dim(x, i, keepdims=False), stacks
  )


def _passed(giver: DeviceFunction, taker: DeviceFunction) -> list[mtf.Tensor]:
  """Returns the tensors that the part `giver` passes to the part `taker`."""
  return [x for x in taker.takes if x in giver.gives]
