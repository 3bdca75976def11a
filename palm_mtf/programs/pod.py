# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Builds a pod's part of a step, before and after the gradient exchange.

gradients   forward and backward pass of the pod's share of the batch
sums        sums of losses and gradients: per microbatch, per step, over pods
update      global clipping and the optimizer; the same on all pods

Every microbatch of a step but the last adds its sums to float32 accumulators.
The last microbatch runs in one call with exchange and update, which use the
accumulators plus the last microbatch's sums. Memory thus holds the activations
of only one microbatch, and a gradient is sent to other pods while the backward
pass still computes the gradients of earlier layers. The client runs a pod's
microbatches one after the other, because a while loop in the program would hold
the batch of the whole step on the devices.

With stages (a pipeline), all microbatches add to the accumulators. A separate
call for exchange and update then reads the accumulators, because the last
microbatch takes several calls (mesh/stages.py).
"""

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import parse_name, sent_dtype
from palm_mtf.config import OptimizerConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.errors import UserError
from palm_mtf.mesh.cpu_gpu import CpuGpuDevices, CpuGpuPlacement
from palm_mtf.mesh.exchange import Exchange, OwnPart
from palm_mtf.mesh.stages import send
from palm_mtf.model.dropout import DROPOUT_STATE
from palm_mtf.model.loss import divisor
from palm_mtf.ops.variables import Fill, SlicedVariable
from palm_mtf.ops.xla import fused
from palm_mtf.optim.clip import (
  all_finite,
  clip_factor,
  global_norm,
  sums_of_squares,
)
from palm_mtf.optim.optimizer import (
  UpdateVariables,
  find_rates,
  optimizer_updates,
  rule_of,
)
from palm_mtf.programs.features import (
  ReadFeatures,
  Stage,
  import_features,
  make_placeholders,
)
from palm_mtf.programs.loss_function import LossFunction, LossSums
from palm_mtf.programs.step_programs import make_scalars


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums of rows' losses and of their gradients, on a pod's mesh, float32."""

  losses: LossSums
  # For each variable, the gradient of the sum of all terms of the loss.
  gradients: Sequence[mtf.Tensor]


def sum_microbatch(
  losses: LossSums,
  variables: Sequence[mtf.Variable],
  streams: Sequence[mtf.Tensor] = (),
) -> Sums:
  """Returns the losses and gradients of one microbatch.

  The gradients of the tensors `streams` follow those of `variables`.

  Raises UserError if the loss does not depend on one of `variables`.
  """
  total = functools.reduce(operator.add, losses.terms.values())
  gradients = mtf.gradients([total], [*(v.value for v in variables), *streams])
  for variable, gradient in zip(variables, gradients, strict=False):
    if gradient is None:
      raise UserError(
        f"the loss does not depend on the variable {variable.name}: leave it "
        "out of the model, or make it with trainable=False."
      )
  return Sums(losses, gradients)


@fused
def _add(total, value):
  return total + tf.cast(value, tf.float32)


class Accumulate(mtf.Operation):
  """Adds its input, a microbatch's loss or gradient, to a variable.

  Runs on all microbatches; without stages, on all but the last.
  """

  def __init__(
    self, name: str, value: mtf.Tensor, is_first: tf.Tensor, dtype: tf.DType
  ):
    """Makes the variable, which no checkpoint holds.

    `name` is unique in the graph. `value`, of any float dtype, is the term to
    add; it replaces the sum if `is_first`, [] bool, is true.
    """
    self.sum_name = name
    self.accumulator = SlicedVariable(
      value.mesh,
      name,
      value.shape,
      initializer=Fill(0.0),
      stored_dtype=dtype,
      activation_dtype=dtype,
      trainable=False,
    )
    super().__init__([value], name=f"{name}/add")
    self._is_first = is_first
    # Mesh axes over which the sum still has to be all-reduced when it is read.
    self.open_axes: list[int] = []

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one in-place addition per slice."""
    sums = lowering.variables[self.accumulator].laid_out_tensor
    part, self.open_axes = _lay_out(lowering, self.inputs[0])
    added = lowering.mesh_impl(self).add(sums, part, self._is_first)
    lowering.operations[self] = tf.group(added)


class AccumulatedSum(mtf.Operation):
  """Outputs the accumulator; without stages, adds the last microbatch to it."""

  def __init__(self, accumulate: Accumulate, has_stages: bool):
    (value,) = accumulate.inputs
    super().__init__(
      [] if has_stages else [value],
      accumulate.mesh,
      name=f"{accumulate.sum_name}/read",
    )
    self._accumulate = accumulate
    dtype = accumulate.accumulator.slice_dtype
    self._outputs = [mtf.Tensor(self, value.shape, dtype)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one operation per slice; does not yet all-reduce the sum."""
    mesh_impl = lowering.mesh_impl(self)
    sums = lowering.variables[self._accumulate.accumulator].laid_out_tensor
    total = mesh_impl.slicewise(tf.convert_to_tensor, sums)
    for value in self.inputs:
      part, _ = _lay_out(lowering, value)
      total = mesh_impl.slicewise(_add, total, part)
    # If a sum is over a split dimension, each device accumulates its own part.
    # The parts are all-reduced when the sum is read, once per step.
    if self._accumulate.open_axes:
      total = mtf.LazyAllreduceSum(mesh_impl, total, self._accumulate.open_axes)
    lowering.set_tensor_lowering(self.outputs[0], total)


def _lay_out(
  lowering: mtf.Lowering, value: mtf.Tensor
) -> tuple[object, list[int]]:
  """Returns a value's slices, and mesh axes over which to all-reduce them."""
  laid_out = lowering.tensors[value]
  if isinstance(laid_out, mtf.LazyAllreduceSum):
    return laid_out.laid_out_input, laid_out.mesh_axes
  return laid_out.to_laid_out_tensor(), []


def accumulate_sums(
  sums: Sums,
  variables: Sequence[mtf.Variable],
  stages: Sequence[Stage],
  num_microbatches: int,
) -> tuple[Sums, list[Accumulate]]:
  """Accumulates the sums of a step's microbatches.

  Returns:
    The sums over the step, and the operations that accumulate. With stages,
    run the operations on each microbatch, and read the sums in a later call.
    Without stages, run the operations on each microbatch except the last, and
    read the sums in the call of the last microbatch.
  """
  terms = sums.losses.terms
  values = {f"{name}_sum": value for name, value in terms.items()}
  values["weight_sum"] = sums.losses.weight
  for variable, gradient in zip(variables, sums.gradients, strict=True):
    values[f"{variable.name}/gradient_sum"] = gradient
  is_first = {x.mesh: x.numbers["is_first"] for x in stages}
  # A single microbatch adds nothing, so store each value in its own dtype.
  dtype = tf.float32 if num_microbatches > 1 else None
  accumulations = [
    Accumulate(name, x, is_first[x.mesh], dtype or x.dtype)
    for name, x in values.items()
  ]
  has_stages = len(stages) > 1
  totals = iter(
    [AccumulatedSum(x, has_stages).outputs[0] for x in accumulations]
  )
  losses = LossSums({name: next(totals) for name in terms}, next(totals))
  return Sums(losses, list(totals)), accumulations


def exchange_sums(
  pods: Sequence[Sums], variables: Sequence[mtf.Variable], dtype: tf.DType
) -> list[Sums]:
  """Returns each pod's sums over all pods; pods send gradients in `dtype`.

  `variables` are a pod's trained variables, in the order of the gradients.
  """
  if len(pods) == 1:
    return list(pods)
  # Each device sends all losses and the weight, which are few, in float32.
  names = list(pods[0].losses.terms)
  numbers = zip(
    *([*x.losses.terms.values(), x.losses.weight] for x in pods), strict=True
  )
  exchanged = [[Exchange(x, y.mesh).outputs[0] for y in x] for x in numbers]
  every = zip(*(x.gradients for x in pods), strict=True)
  for variable, gradients in zip(variables, every, strict=True):
    # Each device of a pod sends a different part of the gradient. A pod rounds
    # its own gradient to `dtype` too, so that all pods add the same values.
    sent = tf.as_dtype(sent_dtype(variable.name, dtype.name))
    own = [OwnPart(x, sent) for x in gradients]
    parts = [x.outputs[0] for x in own]
    exchanged.append([Exchange(parts, x.mesh, x).outputs[0] for x in own])
  sums = []
  for of_pod in zip(*exchanged, strict=True):
    terms, (weight, *gradients) = of_pod[: len(names)], of_pod[len(names) :]
    losses = LossSums(dict(zip(names, terms, strict=True)), weight)
    sums.append(Sums(losses, gradients))
  return sums


@dataclasses.dataclass(frozen=True)
class Gradients:
  """The gradients of one pod, before they are summed over all pods."""

  pod: int
  stages: list[Stage]  # pipeline stages, then the head; or the whole pod
  losses: LossSums  # of one microbatch
  variables: list[mtf.Variable]  # trained variables
  sums: Sums  # over the step's microbatches
  accumulations: list[Accumulate]  # add a microbatch to `sums`


@dataclasses.dataclass(frozen=True)
class Update:
  """The update of one pod's variables; its tensors are [] float32.

  All pods use the same sums, so that their variables stay equal.
  """

  operations: list[UpdateVariables]
  weight: mtf.Tensor  # sum of loss weights; sums divided by it become means
  squares: list[mtf.Tensor]  # sum of squares of each gradient, for grad_norm
  losses: dict[str, mtf.Tensor]  # terms of the loss, and grad_norm
  is_finite: mtf.Tensor  # whether all losses are finite, bool
  # On the mesh of the first stage: the gradients' factor, the optimizer's rates
  # (learning rate, ...) and is_finite.
  scalars: list[mtf.Tensor]

  @property
  def fetched(self) -> dict[str, mtf.Tensor]:
    """Scalars that the client fetches in each step, for metrics, by name."""
    measured = (x for each in self.operations for x in each.sums_of_squares)
    return {
      **self.losses,
      "is_finite": self.is_finite,
      "weight": self.weight,
      **{f"squares/{i}": x for i, x in enumerate(self.squares)},
      **{f"{x.of}_squares/{x.variable}": x.value for x in measured},
    }


class PodBuilder:
  """Builds gradients and update of each pod in one graph."""

  def __init__(
    self,
    loss_function: LossFunction,
    mesh_layout: DeviceMesh,
    optimizer: OptimizerConfig,
    devices: CpuGpuDevices,
    read: ReadFeatures | None,
    num_rows: int,
  ):
    """`num_rows` is the rows of a pod; see `build_program` for the others."""
    self._loss_function, self._optimizer = loss_function, optimizer
    self._mesh_layout, self._devices = mesh_layout, devices
    self._read, self._num_rows = read, num_rows
    self._graph = mtf.Graph()
    # {operation: phase of a traced step}, for all operations before `mark`.
    self.phases: dict[mtf.Operation, str] = {}
    self.scalars = make_scalars(devices, read is not None)

  def mark(self, phase: str) -> None:
    """Sets the phase of the operations made since the last `mark`."""
    made = self._graph.operations[len(self.phases) :]
    self.phases |= dict.fromkeys(made, phase)

  def build_gradients(self, pod: int) -> Gradients:
    """Builds forward and backward pass of a pod."""
    layout = self._mesh_layout
    places = [
      (
        mtf.Mesh(self._graph, f"pod_{pod}/stage_{i}"),
        self._devices.placement(layout, pod, i),
      )
      for i in range(layout.stages)
    ]
    if len(places) > 1:
      places.append(places[0])  # the head runs on the first stage's devices
    stages = [self._build_stage(pod, *x) for x in places]
    meshes = {x.mesh for x in stages}
    with tf.device(stages[0].placement.cpu):
      losses = self._loss_function.build_sums(stages)
      self.mark("forward")
      variables = [
        v for v in self._graph.trainable_variables if v.mesh in meshes
      ]
      sums = sum_microbatch(losses, variables)
      accumulations = []
      if layout.num_microbatches > 1 or len(stages) > 1:
        sums, accumulations = accumulate_sums(
          sums, variables, stages, layout.num_microbatches
        )
    self.mark("backward")
    return Gradients(pod, stages, losses, variables, sums, accumulations)

  def _build_stage(
    self, pod: int, mesh: mtf.Mesh, placement: CpuGpuPlacement
  ) -> Stage:
    """Imports features and scalars into the mesh of a stage."""
    num_before, scalars = len(self._graph.operations), self.scalars
    # Feed rows in the stage's process, so that only this process gets them.
    with tf.device(placement.cpu):
      by_cpu = self._make_placeholders(pod, placement)
      first, *copies = by_cpu.values()
      features = self._loss_function.features
      batch = import_features(mesh, placement, by_cpu, features)
      micro_rows = self._num_rows // self._mesh_layout.num_microbatches
      first_row = (scalars.first_pod + pod) * self._num_rows
      first_row += scalars.microbatch * micro_rows
      numbers = {
        **find_rates(self._optimizer, scalars.step, scalars.slot_step),
        "is_first": tf.equal(scalars.microbatch, 0),
        "dropout_state": build_dropout_state(scalars.step, first_row),
      }
      dropout_state = None
      if self._loss_function.has_dropout:
        dropout_state = mtf.import_tf_tensor(
          mesh, numbers["dropout_state"], mtf.Shape([DROPOUT_STATE])
        )
    imports = self._graph.operations[num_before:]
    return Stage(
      mesh, placement, first, copies, numbers, batch, dropout_state, imports
    )

  def _make_placeholders(
    self, pod: int, placement: CpuGpuPlacement
  ) -> dict[str, dict[str, tf.Tensor]]:
    """Returns {name of a CPU device: {feature: placeholder on this CPU}}."""
    features = self._loss_function.features
    if self._read is None:
      return {placement.cpu: make_placeholders(features)}
    num_microbatches = self._mesh_layout.num_microbatches
    scalars = self.scalars
    num_parts = len(self._devices.pods) * num_microbatches
    by_cpu = {}
    for cpu in placement.reading_cpus:
      with tf.device(cpu):
        part = pod * num_microbatches + scalars.microbatch
        given = scalars.batches, scalars.step, part, num_parts
        values = self._read(cpu, *given)
        by_cpu[cpu] = make_placeholders(features, values)
    return by_cpu

  def build_update(self, gradients: Gradients, sums: Sums) -> Update:
    """Builds the update of a pod from the sums over all pods."""
    stage, meshes = gradients.stages[0], [x.mesh for x in gradients.stages]
    with tf.device(stage.placement.cpu):
      rates = [
        mtf.import_tf_tensor(stage.mesh, stage.numbers[x])
        for x in rule_of(self._optimizer).RATES
      ]
      return build_update(
        gradients.variables, sums, rates, self._optimizer, meshes=meshes
      )


def build_dropout_state(step: tf.Tensor, first_row: tf.Tensor) -> tf.Tensor:
  """Returns `Dropout.state` for a microbatch, [4] int32.

  `step`, [] int64, is the number of steps done before; in step -1 nothing is
  dropped. `first_row`, [] int32, is the index of the first row in the batch of
  all pods.
  """
  state = step, first_row, step >= 0, 0
  return tf.stack([tf.cast(x, tf.int32) for x in state])


def build_update(
  variables: Sequence[mtf.Variable],
  sums: Sums,
  rates: Sequence[mtf.Tensor],
  optimizer: OptimizerConfig,
  *,
  meshes: Sequence[mtf.Mesh],
  periods: Mapping[int, int] | None = None,
) -> Update:
  """Builds the update of a pod's trained variables.

  Args:
    variables: the trained variables.
    sums: sums of losses and gradients, over the step and all pods.
    rates: the optimizer's RATES (`Rule`), [] float32 each.
    meshes: meshes of the variables; the first computes the scalars.
    periods: on accelerators, {layer in the graph: number of layers for which
      it stands}; None if the graph has all layers.
  """
  weight = divisor(sums.losses.weight)
  squares = [send(x, meshes[0]) for x in sums_of_squares(sums.gradients)]
  # Sums over the step become means over the step's tokens.
  losses = {name: x / weight for name, x in sums.losses.terms.items()}
  # What a state gets in place of a gradient is not clipped.
  of_norm = [
    x
    for variable, x in zip(variables, squares, strict=True)
    if not parse_name(variable.name).is_state
  ]
  losses["grad_norm"] = global_norm(of_norm) / weight
  is_finite = all_finite(list(losses.values()))
  # Dividing the gradients would take a pass over large tensors. Instead divide
  # the clipping factor, by which the gradients are multiplied, by the weight.
  clip = clip_factor(losses["grad_norm"], optimizer.gradient_clip)
  scalars = [clip / weight, *rates, is_finite]
  operations = optimizer_updates(
    variables,
    sums.gradients,
    {mesh: [send(x, mesh) for x in scalars] for mesh in meshes},
    optimizer,
    periods,
  )
  return Update(operations, weight, squares, losses, is_finite, scalars)
