# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The TensorFlow graph of a training step.

gradients  each pod: forward and backward pass of its share of the batch
exchange   each pod sends its gradients to all other pods (pod.py)
update     each pod: the same clipping and Adafactor
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.accounting.pipeline import FORWARD, Pass, stage_passes
from palm_mtf.config import AdafactorConfig, MeshLayout, ModelConfig, PodsConfig
from palm_mtf.config.device_mesh import DeviceMesh
from palm_mtf.mesh.cpu_gpu import (
  CpuGpuDevices,
  CpuGpuLowering,
  Devices,
  local_devices,
)
from palm_mtf.mesh.slices import Slice
from palm_mtf.mesh.stages import StagesLowering, find_parts
from palm_mtf.model.loss import divisor
from palm_mtf.optim.adafactor import SumOfSquares, rms_by_kind
from palm_mtf.programs.features import (
  REQUIRED_FEATURES,
  ReadFeatures,
  ServerFeatures,
)
from palm_mtf.programs.loss_function import LossFunction, PalmLoss
from palm_mtf.programs.pod import Gradients, PodBuilder, Update, exchange_sums


@dataclasses.dataclass(frozen=True)
class StageProgram:
  """Operations of a pod's stage, or of its output head, for a microbatch."""

  features: dict[str, tf.Tensor]  # placeholders of a microbatch's rows
  # The same placeholders on the stage's other hosts, so no host sends rows.
  copies: list[dict[str, tf.Tensor]]
  # The forward pass, which keeps what the backward pass reads. `forward` of the
  # output head, or of a pod without stages, includes the backward pass.
  forward: tf.Operation
  backward: tf.Operation | None
  # The forward pass if no gradients are needed. Without stages, `evaluate` is a
  # no-op, because fetching `PodProgram.loss` runs the forward pass.
  evaluate: tf.Operation


@dataclasses.dataclass(frozen=True)
class PodProgram:
  """One pod's part of a training step."""

  # The stages in the order of their layers, then the output head. If there are
  # no stages, the only item is the whole pod.
  stages: list[StageProgram]
  # Mean loss of a microbatch's rows, for PaLM in nats per token, [] float32.
  # Fetching only `loss` runs only the forward pass (with stages, the head's).
  # To average several losses, weight each by its `weight_sum`, [] float32.
  loss: tf.Tensor
  weight_sum: tf.Tensor
  slices: dict[str, list[Slice]]  # by the variable's name in checkpoints

  @property
  def features(self) -> dict[str, tf.Tensor]:
    """Placeholders of the rows that the first stage reads."""
    return self.stages[0].features


@dataclasses.dataclass(frozen=True)
class LoopProgram:
  """Several training steps of one pod of accelerators, in one call.

  One call for several steps saves time, because starting a call takes as long
  as a step of a small model. Feed TrainProgram.step with the number of steps
  done before the call. A program of several pods has no loop, because the pods'
  hosts exchange gradients in each step.
  """

  # Placeholders of the rows of every step, by name: [steps, batch, length]. If
  # a call runs fewer than `max_steps` steps, it ignores the rows of later
  # steps, whose metrics are undefined.
  features: dict[str, tf.Tensor]
  max_steps: int
  num_steps: tf.Tensor  # feed the number of steps to run, [] int32
  # Number of steps that were run, [] int32. The loop ends early after a step
  # whose loss or gradients are not finite. That step counts here, but changes
  # no variable.
  num_done: tf.Tensor
  is_finite: tf.Tensor  # of the last step, as in TrainProgram
  metrics: dict[str, tf.Tensor]  # as in TrainProgram, [steps] float32 each


@dataclasses.dataclass(frozen=True)
class TrainProgram:
  """One training step of all pods.

  Feed `step`, `microbatch` and each stage's features. Run the forward and
  backward passes of each pod (`passes`); then run `update` and `metrics` in one
  call. Without stages, this call also computes the last microbatch.
  """

  # The first rows of a batch go to the first pod, and so on; the first rows of
  # a pod are the pod's first microbatch.
  pods: list[PodProgram]
  batch_size: int
  # Placeholder of the number of steps done before, [] int64. Do not feed it if
  # only the loss is fetched, because the default, -1, turns dropout off.
  step: tf.Tensor
  microbatch: tf.Tensor  # index of the microbatch in the step, [] int32
  num_microbatches: int
  # Updates all variables. If a value in `losses` is infinite or NaN, `update`
  # raises InvalidArgumentError and changes no variable.
  update: tf.Operation
  is_finite: tf.Tensor  # whether all losses are finite, [] bool
  # Terms of the loss (PaLM: "loss", in nats per token, and "z_loss") and
  # "grad_norm", by name, [] float32 each.
  losses: dict[str, tf.Tensor]
  # `losses`, "learning_rate", and root mean squares: "parameter_rms/<kind>" and
  # "update_rms/<kind>" (`rms_by_kind` in optim/adafactor.py), [] float32 each.
  metrics: dict[str, tf.Tensor]
  # Sum of squares of each parameter's gradient, [parameters] float32. Shows
  # which gradient has an infinity or NaN.
  gradient_squares: tf.Tensor
  parameters: list[str]  # names of the trained variables, in the model's order
  initialize: tf.Operation  # draws the initial weights
  devices: Devices
  # Placeholder of the JSON that describes the batches that servers read, []
  # string; None if the client feeds all features.
  batches: tf.Tensor | None
  loop: LoopProgram | None  # None unless STEPS_PER_LOOP is above 1
  # For each stage of a pod, then for the head: the calls to make before
  # `update`, in order. A Pass is (FORWARD, HEAD or BACKWARD; microbatch).
  passes: list[list[Pass]]

  @property
  def slices(self) -> dict[str, list[Slice]]:
    """The first pod's slices; saving these is enough, as all pods are equal."""
    return self.pods[0].slices

  @property
  def pod_slices(self) -> list[dict[str, list[Slice]]]:
    """Each pod's variables: {name in checkpoints: slices}."""
    return [pod.slices for pod in self.pods]


def build_train_program(
  config: ModelConfig,
  mesh_layout: MeshLayout,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  seed: int,
  frozen: Sequence[str] = (),
  features: Sequence[str] | ServerFeatures = REQUIRED_FEATURES,
  pods: PodsConfig = PodsConfig(),  # noqa: B008
  devices: CpuGpuDevices | None = None,
) -> TrainProgram:
  """Builds a training step of PaLM in the current tf.Graph.

  Args:
    config: architecture.
    mesh_layout: axes and layout rules of each pod, checked against `config`.
    optimizer: schedule, clipping, decay and z-loss.
    batch_size: sequences in one step, over all pods.
    seed: seed of the initial weights and of dropout.
    frozen: FROZEN, patterns of parameters that are not trained.
    features: keys of FEATURE_DTYPES that every batch has; a ServerFeatures with
      these keys if servers read the features.
    pods: number of pods, and the dtype of gradients between them.
    devices: devices of the pods; None for the CPUs or GPUs of this process.

  Raises UserError if a feature is unknown, or inputs or targets are missing.
  """
  names, read = features, None
  if isinstance(features, ServerFeatures):
    names, read = features
  loss_function = PalmLoss(
    config,
    mesh_layout,
    optimizer,
    names,
    num_rows=batch_size // (pods.num_pods * mesh_layout.num_microbatches),
    seed=seed,
    frozen=frozen,
  )
  return build_program(
    loss_function,
    mesh_layout,
    optimizer,
    batch_size=batch_size,
    pods=pods,
    devices=devices,
    read=read,
  )


def build_program(
  loss_function: LossFunction,
  mesh_layout: DeviceMesh,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  pods: PodsConfig,
  devices: CpuGpuDevices | None = None,
  read: ReadFeatures | None = None,
) -> TrainProgram:
  """Builds a training step of any model in the current tf.Graph.

  `loss_function` is the model and the loss of a microbatch. `read` builds the
  operations by which servers read features; it is None if the client feeds all
  features. For the other arguments see `build_train_program`.
  """
  devices = devices or local_devices(mesh_layout.pod_devices, pods.num_pods)
  builder = PodBuilder(
    loss_function,
    optimizer,
    pod_batch_size=batch_size // pods.num_pods,
    num_microbatches=mesh_layout.num_microbatches,
    client=devices.client,
    num_pods=pods.num_pods,
  )
  num_stages = mesh_layout.stages
  built = [
    builder.build_gradients(
      pod,
      [devices.placement(mesh_layout, pod, i) for i in range(num_stages)],
      read,
    )
    for pod in range(len(devices.pods))
  ]
  sums = exchange_sums([x.sums for x in built], tf.as_dtype(pods.dcn_dtype))
  updates = [
    builder.build_update(*each) for each in zip(built, sums, strict=True)
  ]
  mean_losses = [
    {
      "loss": x.losses.terms["loss"] / divisor(x.losses.weight),
      "weight_sum": x.losses.weight,
    }
    for x in built
  ]
  lowering = _lower(built)
  losses = [lowering.call(x)[0] for x in mean_losses]
  stages = [_build_stages(pod, lowering) for pod in built]
  step = _lower_step(built[0], updates, lowering)
  if mesh_layout.stages > 1:
    passes = stage_passes(mesh_layout)
  else:  # the last microbatch runs with the update
    passes = [[(FORWARD, i) for i in range(mesh_layout.num_microbatches - 1)]]
  return TrainProgram(
    pods=[
      PodProgram(
        **loss,
        slices=_drop_accumulators(
          pod, lowering.slices[pod.pod * num_stages :][:num_stages]
        ),
        stages=each,
      )
      for pod, loss, each in zip(built, losses, stages, strict=True)
    ],
    batch_size=batch_size,
    step=builder.step,
    microbatch=builder.microbatch,
    num_microbatches=mesh_layout.num_microbatches,
    parameters=[variable.name for variable in built[0].variables],
    initialize=lowering.initialize,
    devices=devices,
    batches=builder.batches if read else None,
    loop=None,
    passes=passes,
    **step,
  )


def _lower(pods: Sequence[Gradients]) -> CpuGpuLowering:
  """Lowers the graph of all pods; with stages, as parts for separate calls."""
  stages = [stage for pod in pods for stage in pod.stages]
  placements = {x.mesh: x.placement for x in stages}
  if len(stages) == len(pods):
    return stages[0].placement.lower(placements)
  first = {}
  for pod in pods:
    for i, stage in enumerate(pod.stages):
      first |= dict.fromkeys(stage.imports, _number_part(pod, i))
    # Put accumulations into the head's part or a later part. Otherwise sums of
    # constants, such as the number of tokens, would be in no part, because
    # constants depend on no import.
    first |= dict.fromkeys(pod.accumulations, _number_part(pod, i))
  return StagesLowering(
    placements, find_parts(stages[0].mesh.graph.operations, first)
  )


def _number_part(pod: Gradients, index: int) -> int:
  """Returns the number of a part of a pod's graph, unique over all pods.

  With S stages a pod has 2 S + 1 parts: forward passes of the stages, the head,
  and backward passes of the stages, the last stage first.
  """
  return pod.pod * (2 * len(pod.stages) - 1) + index


def _build_stages(
  pod: Gradients, lowering: CpuGpuLowering
) -> list[StageProgram]:
  if not isinstance(lowering, StagesLowering):
    _, done = lowering.call({}, pod.accumulations)
    (stage,) = pod.stages
    return [StageProgram(stage.features, stage.copies, done, None, tf.no_op())]
  head = len(pod.stages) - 1
  made = []
  for i, stage in enumerate(pod.stages):
    forward, backward = _number_part(pod, i), _number_part(pod, 2 * head - i)
    made.append(
      StageProgram(
        stage.features,
        stage.copies,
        lowering.run_part(forward, pod.accumulations),
        lowering.run_part(backward, pod.accumulations) if i < head else None,
        lowering.run_part(forward, last=_number_part(pod, head)),
      )
    )
  return made


def _drop_accumulators(
  pod: Gradients, stages: Sequence[Mapping[str, list[Slice]]]
) -> dict[str, list[Slice]]:
  """Returns a pod's slices without accumulators, which are not saved."""
  sums = {each.sum_name for each in pod.accumulations}
  return {
    key: x
    for slices in stages
    for key, x in slices.items()
    if sums.isdisjoint(x[0].names)
  }


def _lower_step(
  pod: Gradients, updates: Sequence[Update], lowering: CpuGpuLowering
) -> dict[str, object]:
  """Lowers the last call of a step; returns fields of `TrainProgram`."""
  operations = [x for update in updates for x in update.operations]
  # All pods compute the same values, so fetch them only from the first pod.
  update = updates[0]
  values, done = lowering.call(update.fetched, operations)
  stage = pod.stages[0]
  losses = {name: values[name] for name in update.losses}
  sums = [
    x._replace(value=values[f"{x.of}_squares/{x.variable}"])
    for each in update.operations
    for x in each.sums_of_squares
  ]
  with tf.device(stage.placement.cpu):
    squares = tf.stack(
      [values[f"squares/{i}"] for i in range(len(update.squares))]
    )
    is_finite = values["is_finite"]
    check = tf.raw_ops.Assert(condition=is_finite, data=[is_finite])
    return {
      "update": tf.group(done, check),
      "is_finite": is_finite,
      "losses": losses,
      "metrics": make_metrics(losses, sums, stage.numbers["learning_rate"]),
      "gradient_squares": squares / tf.square(values["weight"]),
    }


def make_metrics(
  losses: Mapping[str, tf.Tensor],
  sums: Iterable[SumOfSquares],
  learning_rate: tf.Tensor,
) -> dict[str, tf.Tensor]:
  """Returns the metrics of a step, by name, [] float32 each."""
  return {**losses, "learning_rate": learning_rate, **rms_by_kind(sums)}
