# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graph of a training step, which a client runs.

This is where model, optimizer and mesh meet. A program is plain TensorFlow:
what to feed, what to fetch and which slices hold its variables; sessions and
files are the business of the run layer. A training step has three parts:

  A         forward and backward pass, on every pod of its share of the batch
  exchange  each gradient, from each pod to all others (dcn_all_reduce.py)
  B         clipping and update, on every pod the same

What a pod is fed is in features.py.
"""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.config.pods import PodsConfig
from palm_mtf.mesh.lowering import Lowered, lower
from palm_mtf.mesh.placement import Devices, Slice, local_devices
from palm_mtf.mesh.tpu_placement import TpuPlacement, placement_of
from palm_mtf.model.loss import weight_sum, weighted_mean
from palm_mtf.optim.rms import rms_by_kind
from palm_mtf.programs.dcn_all_reduce import exchanged_sums
from palm_mtf.programs.features import REQUIRED_FEATURES
from palm_mtf.programs.pod import Pod, PodBuilder, Update
from palm_mtf.programs.tpu_loop import LoopProgram, lower_loop
from palm_mtf.programs.tpu_program import lower_on_tpus


@dataclasses.dataclass(frozen=True)
class PodProgram:
  """One pod's part of a training step.

  Attributes:
    features: what to feed of its part of a microbatch, by name, in the order
      asked for.
    loss: [], float32: nats a token of that part; fetched alone it runs the
      forward pass alone.
    weight_sum: [], float32: how many tokens the loss is the mean of. The mean
      loss of several parts is that of their losses, weighted by it.
    slices: slices of every variable, by its checkpoint name; of a stack, by
      that of its first (mesh/placement.py).
    accumulate: adds the gradients and sums of its part to those of the step.
  """

  features: dict[str, tf.Tensor]
  loss: tf.Tensor
  weight_sum: tf.Tensor
  slices: dict[str, list[Slice]]
  accumulate: tf.Operation


@dataclasses.dataclass(frozen=True)
class TrainProgram:
  """One training step of all pods.

  Attributes:
    pods: what each of them is fed. The rows of a step are theirs in order, and
      those of a pod its microbatches' in order.
    step: [], int64: feed the number of steps done before this one. Where it is
      not fed, for the loss of other batches, nothing is dropped.
    microbatch: [], int32: feed which of the step it is, from 0.
    num_microbatches: in a step. Run `accumulate` of each pod on each of them
      but the last, and `update` and `metrics`, at once, on that.
    update: updates all variables. Where loss, z_loss or grad_norm is infinite
      or no number it raises InvalidArgumentError, and changes nothing.
    losses: losses of the step, [] float32 each: loss (nats a token), z_loss and
      grad_norm.
    metrics: metrics of the step, [] float32 each: `losses`, learning_rate, and
      those of optim/rms.py, which raise like `update`.
    gradient_squares: [variables], float32: the sum of squares of the gradient
      of each variable of `parameters`.
    parameters: names of the variables that are trained, in the model's order.
    initialize: draws the first weights.
    devices: where all of it is placed.
    loop: several steps in one call, where devices can do that.
  """

  pods: list[PodProgram]
  step: tf.Tensor
  microbatch: tf.Tensor
  num_microbatches: int
  gradient_squares: tf.Tensor
  parameters: list[str]
  update: tf.Operation
  losses: dict[str, tf.Tensor]
  metrics: dict[str, tf.Tensor]
  initialize: tf.Operation
  devices: Devices
  loop: LoopProgram | None

  @property
  def slices(self) -> dict[str, list[Slice]]:
    """Those of the first pod: what is saved, for all pods hold the same."""
    return self.pods[0].slices


def build_train_program(
  config: PalmConfig,
  mesh_layout: MeshLayout,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  seed: int,
  features: Sequence[str] = REQUIRED_FEATURES,
  pods: PodsConfig = PodsConfig(),  # noqa: B008
  devices: Devices | None = None,
) -> TrainProgram:
  """Builds forward, backward, exchange and update in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules of each pod, checked against `config`.
    optimizer: schedule, clipping, decay and z-loss.
    batch_size: sequences in one step, of all pods.
    seed: seed of the initial weights.
    features: names among FEATURE_DTYPES: what every batch has.
    pods: how many there are, and the dtype of gradients between them.
    devices: devices of the pods; None for devices of this process.

  Raises:
    UserError: there is no such feature, or inputs or targets are missing.
  """
  devices = devices or local_devices(mesh_layout.num_devices, pods.num_pods)
  builder = PodBuilder(
    config,
    mesh_layout,
    optimizer,
    pod_batch_size=batch_size // pods.num_pods,
    seed=seed,
    client=devices.client,
  )
  built = [
    builder.pod(index, placement_of(mesh_layout, devices, index), features)
    for index in range(len(devices.pods))
  ]
  sums = exchanged_sums([x.sums for x in built], tf.as_dtype(pods.dcn_dtype))
  updates = [builder.update(*each) for each in zip(built, sums, strict=True)]
  lowered = _lower(built, updates, _asked(updates[0]))
  fetched = _fetched(built[0], updates[0], lowered.tensors)
  return TrainProgram(
    pods=list(_pod_programs(built, lowered)),
    step=builder.step,
    microbatch=builder.microbatch,
    num_microbatches=mesh_layout.num_microbatches,
    parameters=[variable.name for variable in built[0].variables],
    update=lowered.operations,
    initialize=lowered.initialize,
    devices=devices,
    loop=_loop(builder, built[0], updates[0], mesh_layout),
    **fetched,
  )


def _lower(
  pods: Sequence[Pod],
  updates: Sequence[Update],
  tensors: Mapping[str, mtf.Tensor],
) -> Lowered:
  """Lowers all pods, with `tensors`, and each pod's loss of other batches."""
  of_forward_pass = []
  for pod in pods:
    token_loss, weights = pod.tokens.token_loss, pod.tokens.loss_weights
    of_forward_pass.append(
      {
        f"loss/{pod.index}": weighted_mean(token_loss, weights),
        f"weight_sum/{pod.index}": weight_sum(token_loss, weights),
      }
    )
  if isinstance(pods[0].placement, TpuPlacement):
    return lower_on_tpus(pods, updates, tensors, of_forward_pass)
  for each in of_forward_pass:
    tensors = {**tensors, **each}
  return lower(
    {pod.mesh: pod.placement for pod in pods},
    tensors,
    [operation for update in updates for operation in update.operations],
    [accumulation for pod in pods for accumulation in pod.accumulations],
  )


def _pod_programs(
  pods: Sequence[Pod], lowered: Lowered
) -> Iterator[PodProgram]:
  for pod, slices, accumulate in zip(
    pods, lowered.slices, lowered.accumulations, strict=True
  ):
    sums = {each.sum_name for each in pod.accumulations}
    yield PodProgram(
      pod.features,
      lowered.tensors[f"loss/{pod.index}"],
      lowered.tensors[f"weight_sum/{pod.index}"],
      {key: x for key, x in slices.items() if sums.isdisjoint(x[0].names)},
      accumulate,
    )


def _asked(update: Update) -> dict[str, mtf.Tensor]:
  """Returns what is fetched of a step, [] float32 each, losses first."""
  return {
    **update.losses,
    "weight": update.weight,
    **{f"squares/{i}": x for i, x in enumerate(update.squares)},
  }


def _fetched(
  pod: Pod, update: Update, tensors: Mapping[str, tf.Tensor]
) -> dict[str, object]:
  """Returns losses, metrics and gradient_squares of a TrainProgram."""
  learning_rate = pod.numbers["learning_rate"]
  with tf.device(pod.placement.host):
    squares = tf.stack(
      [tensors[f"squares/{i}"] for i in range(len(update.squares))]
    )
    return {
      "gradient_squares": squares / tf.square(tensors["weight"]),
      "losses": {name: tensors[name] for name in update.losses},
      "metrics": _metrics(update, tensors, learning_rate),
    }


def _metrics(
  update: Update, tensors: Mapping[str, tf.Tensor], learning_rate: tf.Tensor
) -> dict[str, tf.Tensor]:
  """Returns the metrics of a step, or of [steps] alike."""
  return {
    **{name: tensors[name] for name in update.losses},
    "learning_rate": learning_rate,
    **rms_by_kind(
      each for op in update.operations for each in op.sums_of_squares
    ),
  }


def _loop(
  builder: PodBuilder, pod: Pod, update: Update, mesh_layout: MeshLayout
) -> LoopProgram | None:
  """Returns the steps that a pod of TPUs does in one call, if it does."""
  if mesh_layout.steps_per_loop == 1:
    return None
  metrics_of = functools.partial(_metrics, update)
  asked = _asked(update)
  return lower_loop(builder, pod, update, asked, metrics_of, mesh_layout)
