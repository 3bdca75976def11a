# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The programs of a training step: an executor builds them for a plan."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf._tf import tf
from palm_mtf.mesh.cpu_gpu import Devices
from palm_mtf.mesh.slices import Pods, Slice, variables_of
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.steps.plan import PARAMETERS, ROWS, SUMS, Call, Node, StepPlan

# For each process that reads rows of a microbatch, {feature: placeholder}. A
# client that feeds rows feeds all processes, so that no process sends rows.
Rows = Sequence[Mapping[str, tf.Tensor]]


class CallGraph(NamedTuple):
  """What a call of a plan runs."""

  operations: Sequence[tf.Operation] = ()
  outputs: Any = ()


class BatchRows(NamedTuple):
  """Rows of a batch that an input takes."""

  # The first rows of a batch go to the first pod, and so on; the first rows of
  # a pod are the pod's first microbatch.
  feature: str
  first: int  # first row of the pod
  size: int  # rows of a microbatch, or of the pod if a call takes all of them


class Scalars(NamedTuple):
  """Placeholders that every call of a step feeds."""

  # Number of steps done before, [] int64. Not fed for a loss, because the
  # default, -1, turns dropout off.
  step: tf.Tensor
  # Number of steps since the optimizer's slots were 0, [] int64; `step` if the
  # run began with them.
  slot_step: tf.Tensor
  # Number of the first pod among all pods of the run, [] int32. Dropout counts
  # the rows of a batch from the first row of the first of all pods.
  first_pod: tf.Tensor
  microbatch: tf.Tensor  # index of the microbatch in the step, [] int32
  # JSON that describes the batches that servers read, [] string; None if the
  # client feeds all features.
  batches: tf.Tensor | None


def make_scalars(devices: Devices, reads_batches: bool) -> Scalars:
  """Makes the placeholders; `reads_batches` is whether servers read batches."""
  with tf.device(devices.client):
    no_step = tf.constant(-1, tf.int64)
    step = tf.placeholder_with_default(no_step, [], "step")
    return Scalars(
      step,
      tf.placeholder_with_default(step, [], "slot_step"),
      tf.placeholder_with_default(devices.first_pod, [], "first_pod"),
      tf.placeholder_with_default(0, [], "microbatch"),
      tf.placeholder(tf.string, [], "batches") if reads_batches else None,
    )


class Inputs(NamedTuple):
  """What the calls of a training step feed."""

  scalars: Scalars
  rows: Mapping[str, Rows]  # of each node that reads rows, by the node's name
  pod_rows: int  # rows of a batch that each pod gets


# Terms of the loss whose means validation reports, where a model has them.
VALIDATED = ("loss", "rewards/margins", "rewards/accuracies")


class LossProgram(NamedTuple):
  """The loss of a batch on one pod."""

  features: Mapping[str, tf.Tensor]  # placeholders of the rows
  # Mean loss of the rows, for PaLM in nats per token, [] float32. To average
  # several losses, weight each by its `weight_sum`, [] float32.
  loss: tf.Tensor
  weight_sum: tf.Tensor
  slices: Mapping[str, list[Slice]]  # of the weights, by name in checkpoints
  # [batch, length, vocab], LOGITS_DTYPE; None for a pod of accelerators.
  logits: tf.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class StepPrograms:
  """The programs of a training step, and of a batch's losses."""

  # The step. Its last call returns the metrics: terms of the loss (for PaLM
  # "loss", in nats per token, and "z_loss"), "grad_norm", "learning_rate", root
  # mean squares, "parameter_rms/<kind>" and "update_rms/<kind>" (`rms_by_kind`
  # in optim/optimizer.py), and with experts "expert_load" (`largest_load`), []
  # float32 each. If a loss or the gradient norm is not finite, the last call
  # raises InvalidArgumentError and changes no variable.
  plan: StepPlan
  # The losses of a batch. The last call of each pod returns the means over its
  # rows of the terms in VALIDATED, and the sum of their weights
  # (`LossProgram`).
  losses: StepPlan
  # The program of each call of both plans, by `Call.nodes`.
  programs: Mapping[tuple[str, ...], Program]
  # Program of the last call's microbatch that changes no variable. It returns
  # the losses and "grad_norm" by name, the sum of squares of each parameter's
  # gradient, [parameters] float32, and whether all losses are finite, [] bool.
  measure: Program
  # Where in a batch the rows of an input are, by the input's name.
  rows: Mapping[str, BatchRows]
  batch_size: int  # sequences in a step, over all pods
  # Names of the trained variables, in the order of the model.
  parameters: list[str]
  pod_slices: Pods  # each pod's variables: {name in checkpoints: slices}
  initialize: tf.Operation  # draws the initial weights
  devices: Devices
  # Options of the calls of the first step.
  first_options: tf.RunOptions | None = None
  # Program of several steps of one pod, or None. A call returns the metrics of
  # each step, [steps] float32 each; the number of steps that were run, []
  # int32; and whether the last of them is finite. The loop ends early after a
  # step that is not finite, which changes no variable. Inputs: "step" and
  # "num_steps", [] each, and the features, [steps, batch, length] each; rows of
  # steps after `num_steps` are ignored.
  loop: Program | None = None
  # {name scope of operations in the graph: phase}; see `read_trace`
  # (training/step_trace.py).
  phases: Mapping[str, str] = dataclasses.field(default_factory=dict)

  @property
  def update(self) -> Program:
    """The program of the plan's last call."""
    return self.programs[self.plan.last.nodes]

  @property
  def reads_batches(self) -> bool:
    """Whether servers read the batches, so that the client feeds no rows."""
    return "batches" in self.update.inputs

  @property
  def slices(self) -> Mapping[str, Sequence[Slice]]:
    """The first pod's slices; saving these is enough, as all pods are equal."""
    return self.pod_slices[0]


def make_programs(
  plans: Sequence[StepPlan],
  graphs: Mapping[tuple[str, ...], CallGraph],
  inputs: Inputs,
  pod_slices: Pods,
  devices: Devices,
) -> dict[str, Any]:
  """Returns the fields `programs`, `measure` and `rows` of `StepPrograms`.

  `plans` are the plans of a step and of its losses. `graphs` has the graph of
  each call, by `Call.nodes`, and under the key () the graph of `measure`.
  """
  return _Maker(inputs, pod_slices, devices).make(plans, graphs)


class _Maker:
  """Makes the programs of `make_programs`."""

  def __init__(self, inputs: Inputs, pod_slices: Pods, devices: Devices):
    self._inputs, self._devices = inputs, devices
    scalars = inputs.scalars._asdict()
    self._scalars = {x: y for x, y in scalars.items() if y is not None}
    self._variables = [state_of(variables_of([x])) for x in pod_slices]
    self._rows: dict[str, BatchRows] = {}

  def make(self, plans, graphs) -> dict[str, Any]:
    programs = {
      call.nodes: self._make_program(plan, call, graphs[call.nodes])
      for plan in plans
      for call in plan.calls
    }
    step, _ = plans
    update = programs[step.last.nodes]
    measure = dataclasses.replace(
      update,
      outputs=graphs[()].outputs,
      operations=(),
      reads=update.reads | update.writes,
      writes=frozenset(),
    )
    return {"programs": programs, "measure": measure, "rows": self._rows}

  def _make_program(
    self, plan: StepPlan, call: Call, graph: CallGraph
  ) -> Program:
    nodes = plan.nodes_of(call)
    inputs = {} if plan.last is None else {**self._scalars}
    for node in nodes:
      if ROWS in node.reads and (plan.last is None or "batches" not in inputs):
        inputs |= self._name_rows(node)
    used = dict.fromkeys(
      x for node in nodes for x in self._devices.pods[node.pod]
    )
    return Program(
      inputs,
      graph.outputs,
      graph.operations,
      self._state(plan, nodes, "reads"),
      self._state(plan, nodes, "writes"),
      dict.fromkeys(used, 0),
    )

  def _name_rows(self, node: Node) -> dict[str, tf.Tensor]:
    """Returns the placeholders of a node's rows by their names as inputs."""
    named = {}
    for i, copy in enumerate(self._inputs.rows[node.name]):
      for feature, placeholder in copy.items():
        name = f"{node.name}/copy_{i}/{feature}"
        size = placeholder.shape.as_list()[0]
        first = node.pod * self._inputs.pod_rows
        self._rows[name] = BatchRows(feature, first, size)
        named[name] = placeholder
    return named

  def _state(
    self, plan: StepPlan, nodes: Sequence[Node], use: str
  ) -> frozenset[str]:
    """Returns the state that nodes read or write, for the order of calls."""
    found: set[str] = set()
    for node in nodes:
      used = getattr(node, use)
      if PARAMETERS in used:  # these variables' devices have the slots, too
        found |= self._variables[node.pod]
      if SUMS in used:
        found.update(
          # Each node adds to its own sums, so that stages compute at the same
          # time.
          f"sums of {x.name} on {[*self._devices.pods[x.pod]]}"
          for x in ([node] if use == "writes" else plan.nodes)
          if x.pod == node.pod and SUMS in x.writes
        )
    return frozenset(found)
