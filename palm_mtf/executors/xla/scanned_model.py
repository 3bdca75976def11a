# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""PaLM's loss and the loss's gradients, as a JAX function for each device.

The graph has the layers of the first period of each group (layer_loops.py),
which stand for the layers of all periods. The graph's parts, in the order in
which they run:

  embedding
  a group's period, forward    for each group, from the first to the last
  last norm, logits and loss, with their gradients
  a group's period, backward   for each group, from the last to the first
  gradient of the embedding

JAX scans the parts of a group over its periods, so that neither the size of the
program nor the time to compile it grows with the number of periods.
"""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from palm_mtf._tf import mtf
from palm_mtf.architecture.parameters import (
  INPUT_TABLES,
  first_in_backward,
  parameters_of,
  parse_name,
)
from palm_mtf.config import (
  OPTIMIZERS,
  LossConfig,
  MeshLayout,
  ModelConfig,
  OptimizerConfig,
)
from palm_mtf.executors.xla.device_model import Arrays, DeviceModel
from palm_mtf.executors.xla.layer_loops import (
  LayerLoop,
  is_stacked,
  loops_of,
  stacked_names,
  unstacked,
)
from palm_mtf.executors.xla.parts import DeviceFunction, cut, cut_graph
from palm_mtf.programs.loss_function import PalmLoss

# The argument `dropout_state` of a pass without dropout.
_NO_DROPOUT = np.array([-1, 0, 0, 0], np.int32)
# The variables of a loop, each stacked over the loop's periods, [periods, ...];
# and the periods' numbers, [periods] int32.
_Periods = tuple[Arrays, jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepSettings:
  """All settings that the training programs of a pod depend on."""

  model: ModelConfig
  # Mesh axes and layout rules of a pod. Each rule splits the dimensions of
  # `model` evenly.
  mesh_layout: MeshLayout
  # None for a program that only computes losses.
  optimizer: OptimizerConfig | None = dataclasses.field(
    metadata={"choices": OPTIMIZERS}
  )
  loss: LossConfig
  features: Sequence[str]  # names of the features of every batch
  num_rows: int  # sequences per step and pod, in all microbatches
  dcn_dtype: str  # dtype in which pods exchange gradients
  seed: int  # seed of the initial weights and of dropout
  frozen: Sequence[str] = ()  # FROZEN, patterns of untrained parameters

  @property
  def loops(self) -> tuple[LayerLoop, ...]:
    """The loops over the layers of the model."""
    return loops_of(self.model, tuple(self.frozen), self.mesh_layout.stages)

  def stage_of(self, layer: int) -> int:
    """Returns the pipeline stage that computes a layer."""
    return layer * self.mesh_layout.stages // self.model.num_layers

  def loops_in(self, stage: int) -> list[LayerLoop]:
    """Returns the loops over the layers of a pipeline stage."""
    return [x for x in self.loops if self.stage_of(x.layers[0]) == stage]

  @property
  def micro_rows(self) -> int:
    """Number of sequences that one pod has in each microbatch."""
    return self.num_rows // self.mesh_layout.num_microbatches


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Scan:
  """A loop over layers, with the functions that compute a period."""

  loop: LayerLoop
  forward: DeviceFunction
  # `forward`, without the results that only `backward` takes.
  infer: DeviceFunction
  # `before` and `after`: the residual stream before and after a period.
  before: mtf.Tensor
  after: mtf.Tensor
  # Gradients of the period's variables, by name.
  gradients: Mapping[str, mtf.Tensor]
  # Computes `gradients`; None if the backward pass does not reach the loop.
  backward: DeviceFunction | None = None
  after_gradient: mtf.Tensor | None = None
  # `before_gradient` and `after_gradient`: gradients of `before` and `after`.
  before_gradient: mtf.Tensor | None = None

  @property
  def length(self) -> int:
    """Number of layers of a period."""
    return len(self.loop.layers)

  def periods(self, variables: Arrays) -> _Periods:
    """Returns the arguments of `lax.scan`, stacked over the loop's periods."""
    return self.loop.select(variables), jnp.arange(self.loop.count)

  def run_infer(
    self, call: Callable, periods: _Periods, x: jax.Array
  ) -> jax.Array:
    """Returns the residual stream after the loop; x is the stream before it."""

    def run(x, period):
      found = call(self.infer, {self.before: x}, *period, self.length)
      return found[self.after], None

    return lax.scan(run, x, periods)[0]

  def run_forward(
    self, call: Callable, periods: _Periods, x: jax.Array
  ) -> tuple[jax.Array, Any]:
    """Like `run_infer`; also returns what `run_backward` takes as `kept`."""
    kept = _passed(self.forward, self.backward)

    def run(x, period):
      found = call(self.forward, {self.before: x}, *period, self.length)
      return found[self.after], ([found[x] for x in kept], x)

    return lax.scan(run, x, periods)

  def run_backward(
    self, call: Callable, periods: _Periods, kept: Any, gradient: jax.Array
  ) -> tuple[jax.Array, Arrays]:
    """Returns the gradients of the stream before the loop and of the variables.

    `gradient` is the gradient of the residual stream after the loop.
    """
    names = _passed(self.forward, self.backward)

    def run(gradient, of_period):
      period, (found, x) = of_period
      taken = dict(zip(names, found, strict=True))
      taken |= {self.before: x, self.after_gradient: gradient}
      found = call(self.backward, taken, *period, self.length)
      own = {name: found[x] for name, x in self.gradients.items()}
      return found[self.before_gradient], own

    return lax.scan(run, gradient, (periods, kept), reverse=True)


class ScannedModel(DeviceModel):
  """Loss and gradients of a microbatch on the devices of a pod.

  The variables of the layers are stacked; see layer_loops.py.
  """

  def __init__(self, settings: StepSettings, platform: str):
    """Builds the graph; `platform` is "cpu", "tpu" or "cuda"."""
    self._settings = settings
    loops = settings.loops
    # Numbers of the loops that the backward pass visits: all from the loop with
    # the first trained layer or, if the embedding is trained, all loops.
    begin = first_in_backward(settings.model, tuple(settings.frozen))
    visited = [i for i, x in enumerate(loops) if begin < x.end]
    embeds = not {*INPUT_TABLES}.isdisjoint(self.parameters)
    passed: list[mtf.Tensor] = []

    def pass_on(x: mtf.Tensor, unused_mesh: mtf.Mesh) -> mtf.Tensor:
      passed.append(x)
      return cut(x)

    loss_function = PalmLoss(
      settings,
      settings.features,
      num_rows=settings.micro_rows,
      seed=settings.seed,
      frozen=settings.frozen,
      pass_on=pass_on,
      layers=[x.layers for x in loops],
    )
    super().__init__(
      loss_function,
      settings.mesh_layout,
      platform,
      num_stages=len(loops) + 1,  # the loops and the head, all on one mesh
      # The graph has to compute the gradient of the stream before the first
      # loop with a backward pass, even if no earlier part needs that gradient,
      # because each period of the loop passes it to the period before.
      find_stream=lambda: None if embeds or not visited else passed[visited[0]],
    )
    head, end = len(loops) + 1, 2 * len(loops) + 2
    functions, self.open_axes = cut_graph(
      self.placement,
      self.mesh.graph,
      {self.features["inputs"]: 0, self.sums.weight.operation: head},
      [
        *self.losses.values(),
        *self.gradients.values(),
        *([] if self.stream_gradient is None else [self.stream_gradient]),
      ],
      scanned=[x for x in range(1, end) if x != head],
    )
    self._embed, self._head = functions[0], functions[head]
    self._embed_gradient = functions[end] if embeds else None
    # The tensor that each part passes to the next: the residual stream, or its
    # gradient.
    streams = [_passed(*x)[0] for x in itertools.pairwise(functions)]
    self._scans = []
    for i, loop in enumerate(loops, 1):
      scan = _Scan(
        loop=loop,
        forward=functions[i],
        infer=self._keep(functions[i], [streams[i]]),
        before=streams[i - 1],
        after=streams[i],
        gradients=loop.select(self.gradients),
      )
      if i - 1 in visited:
        scan = dataclasses.replace(
          scan,
          backward=functions[end - i],
          after_gradient=streams[end - i - 1],
          before_gradient=streams[end - i],
        )
      self._scans.append(scan)
    self._infer_head = self._keep(self._head, [*self.losses.values()])
    self._scans_of = {
      stage: [x for x in self._scans if x.loop in settings.loops_in(stage)]
      for stage in range(settings.mesh_layout.stages)
    }
    # The tensors of the head that the gradient of the embedding needs.
    self._head_gives = []
    if self._embed_gradient:
      self._head_gives = _passed(self._head, self._embed_gradient)

  def _keep(
    self, part: DeviceFunction, gives: Sequence[mtf.Tensor]
  ) -> DeviceFunction:
    """Returns a part with only the operations that compute `gives`."""
    return DeviceFunction(
      self.placement, part.takes, gives, open_axes=self.open_axes
    )

  @property
  def parameters(self) -> Sequence[str]:
    """Names of the trained variables in checkpoints, in the model's order."""
    own = parameters_of(self._settings.model, tuple(self._settings.frozen))
    return [x.name for x in own if x.is_trained]

  def names_of(self, array: str) -> list[str]:
    """Returns an array's names in checkpoints: one per period, if stacked."""
    return stacked_names(self._settings.loops, array)

  def stage_of(self, name: str) -> int:
    """Returns the pipeline stage that holds an array."""
    layer = parse_name(name).layer
    return 0 if layer is None else self._settings.stage_of(layer)

  def gradients_in(self, stage: int) -> list[str]:
    """Returns names of the gradients that a stage's `run_backward` computes."""
    found = [x for y in self._scans_of[stage] for x in y.gradients]
    if stage == 0:
      found += unstacked(self.gradients).keys() - {*self.gradients_of_head}
    return found

  def has_backward(self, stage: int) -> bool:
    """Returns whether the backward pass reaches a stage."""
    return any(x.backward for x in self._scans_of[stage])

  @property
  def gradients_of_head(self) -> list[str]:
    """Names of the gradients that `run_head` computes."""
    wanted = unstacked(self.gradients).items()
    return [name for name, x in wanted if x in self._head.gives]

  def is_stacked(self, name: str) -> bool:
    """Returns whether the array `name` stacks a variable of several layers."""
    return is_stacked(name)

  @property
  def stream(self) -> mtf.Tensor:
    """The residual stream before a layer."""
    return self._scans[0].before

  def find_gradients(
    self, variables: Arrays, batch: Arrays, dropout_state: jax.Array
  ) -> tuple[Arrays, Arrays]:
    """Returns one device's terms of the sums of losses and of the gradients.

    Call this method inside `jax.shard_map`. Then call `add_up`, which adds the
    other devices' terms. `add_up` communicates, so with several microbatches,
    first sum the results of this method over microbatches, and then call
    `add_up` once.

    Args:
      variables, batch: the device's slices of variables and features, by name.
      dropout_state: [4] int32, which determines the masks: step, number of the
        first sequence in the batch, whether to drop, and how many times dropout
        is applied before the first layer; unused if DROPOUT is 0.
    """
    given = variables, batch, dropout_state
    x, kept = None, []
    for stage in self._scans_of:
      x, of_stage = self.run_forward(stage, *given, x)
      kept.append(of_stage)
    losses, gradients, gradient, of_head = self.run_head(*given, x)
    # Without a barrier, XLA adds up the embedding's two gradients before it
    # reduces them, and keeps the operands of the first in memory through the
    # whole backward scan.
    gradient, of_head = jax.lax.optimization_barrier((gradient, of_head))
    for stage in reversed(self._scans_of):
      gradient, found = self.run_backward(
        stage, *given, kept[stage], gradient, of_head
      )
      gradients |= found
    return losses, gradients

  def run_forward(
    self,
    stage: int,
    variables: Arrays,
    batch: Arrays,
    dropout_state: jax.Array,
    x: jax.Array | None,
  ) -> tuple[jax.Array, Any]:
    """Computes the layers of a stage.

    For the first arguments see `find_gradients`. `x` is the residual stream
    before the stage; None before stage 0, which begins with the embedding.

    Returns:
      The residual stream after the stage, and what `run_backward` takes as
      `kept`.
    """
    call, kept = self._caller(batch, dropout_state), []
    if x is None:
      x = call(self._embed, {}, variables)[self._scans[0].before]
    for scan in self._scans_of[stage]:
      periods = scan.periods(variables)
      if scan.backward:
        x, of_scan = scan.run_forward(call, periods, x)
        kept.append(of_scan)
      else:
        x = scan.run_infer(call, periods, x)
    return x, kept

  def run_head(
    self,
    variables: Arrays,
    batch: Arrays,
    dropout_state: jax.Array,
    x: jax.Array,
  ) -> tuple[Arrays, Arrays, jax.Array | None, list[jax.Array]]:
    """Computes the head from `x`, the residual stream after all layers.

    Returns:
      The losses, and the gradients of the head's variables, by name; the
      gradient of `x`, None if no layer needs it; and what `run_backward` of
      stage 0 takes as `of_head`.
    """
    call, last = self._caller(batch, dropout_state), self._scans[-1]
    values = call(self._head, {last.after: x}, variables)
    return (
      {name: values[x] for name, x in self.losses.items()},
      self._outside(values),
      values.get(last.after_gradient),
      [values[x] for x in self._head_gives],
    )

  def run_backward(
    self,
    stage: int,
    variables: Arrays,
    batch: Arrays,
    dropout_state: jax.Array,
    kept: Any,
    gradient: jax.Array | None,
    of_head: Sequence[jax.Array],
  ) -> tuple[jax.Array | None, Arrays]:
    """Computes the backward pass of a stage.

    Args:
      variables, batch, dropout_state: as in `find_gradients`.
      kept: what `run_forward` of this stage returns.
      gradient: gradient of the residual stream after the stage.
      of_head: what `run_head` returns; only stage 0 reads it.

    Returns:
      The gradient of the residual stream before the stage, and the gradients of
      the stage's variables, by name.
    """
    call, gradients = self._caller(batch, dropout_state), {}
    scans = [x for x in self._scans_of[stage] if x.backward]
    for scan, of_scan in reversed([*zip(scans, kept, strict=True)]):
      periods = scan.periods(variables)
      gradient, found = scan.run_backward(call, periods, of_scan, gradient)
      gradients |= found
    if stage == 0 and self._embed_gradient:
      taken = dict(zip(self._head_gives, of_head, strict=True))
      taken[self._scans[0].before_gradient] = gradient
      found = call(self._embed_gradient, taken, variables)
      gradients |= self._outside(found)
    return gradient, gradients

  def _outside(self, values: Mapping[mtf.Tensor, jax.Array]) -> Arrays:
    """Returns gradients of variables outside of all layers, by name."""
    wanted = unstacked(self.gradients).items()
    return {name: values[x] for name, x in wanted if x in values}

  def find_losses(self, variables: Arrays, batch: Arrays) -> Arrays:
    """Returns one device's terms of the losses' sums, without dropout.

    `find_gradients` explains the arguments, and how to sum over devices.
    """
    x = None
    for stage in self._scans_of:
      x = self.infer(stage, variables, batch, x)
    return self.infer_head(variables, batch, x)

  def infer(
    self, stage: int, variables: Arrays, batch: Arrays, x: jax.Array | None
  ) -> jax.Array:
    """Computes the layers of a stage, without dropout; see `run_forward`."""
    call = self._caller(batch, _NO_DROPOUT)
    if x is None:
      x = call(self._embed, {}, variables)[self._scans[0].before]
    for scan in self._scans_of[stage]:
      x = scan.run_infer(call, scan.periods(variables), x)
    return x

  def infer_head(
    self, variables: Arrays, batch: Arrays, x: jax.Array
  ) -> Arrays:
    """Returns the losses from `x`, the residual stream after all layers."""
    call, last = self._caller(batch, _NO_DROPOUT), self._scans[-1]
    values = call(self._infer_head, {last.after: x}, variables)
    return {name: values[x] for name, x in self.losses.items()}

  def _caller(self, batch: Arrays, dropout_state: jax.Array) -> Callable:
    """Returns a function that runs one part of the graph on one device."""
    given = {x.outputs[0]: batch[name] for name, x in self.features.items()}

    def call(function, taken, variables, period=0, length=1):
      # All periods run the same graph, but need different dropout masks. The
      # last number of the state counts the earlier uses of dropout. A layer
      # uses dropout twice, so add 2 * `length` (layers) per earlier period.
      before = jnp.array([0, 0, 0, 2 * length]) * period
      places_before = dropout_state + before
      state = {self._dropout_state: places_before}
      return function({**given, **state, **taken}, variables)[0]

    return call


def _passed(giver: DeviceFunction, taker: DeviceFunction) -> list[mtf.Tensor]:
  """Returns the tensors that the part `giver` passes to the part `taker`."""
  return [x for x in taker.takes if x in giver.gives]
