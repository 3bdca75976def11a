# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graphs that a client runs: a training step, and a forward pass.

This is where model, optimizer and mesh meet. A program is plain TensorFlow:
what to feed, what to fetch and which slices hold its variables; sessions and
files are the business of the run layer. A training step has three parts:

  A         on every pod: forward and backward pass of its share of the batch
  exchange  each gradient, from each pod to all others (exchange.py)
  B         on every pod: clipping and update, the same bits on each

What a pod is fed is in features.py.
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config import AdafactorConfig, PalmConfig
from palm_mtf.layout import MeshLayout
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.placement import (
  Devices,
  Slice,
  SlicePlacement,
  local_devices,
)
from palm_mtf.model.dims import model_dims
from palm_mtf.model.dropout import Dropout
from palm_mtf.model.loss import (
  cross_entropy,
  divisor,
  weight_sum,
  weighted_mean,
)
from palm_mtf.model.palm import Palm
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import AdafactorUpdate, adafactor_updates
from palm_mtf.optim.clip import clip_factor, global_norm, sums_of_squares
from palm_mtf.optim.rms import rms_by_kind
from palm_mtf.pods.exchange import exchanged_sums
from palm_mtf.pods.features import (
  REQUIRED_FEATURES,
  import_features,
  placeholders,
)
from palm_mtf.pods.microbatches import (
  Accumulate,
  Sums,
  TokenLosses,
  accumulated,
  microbatch_sums,
)
from palm_mtf.pods_config import PodsConfig


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
    slices: of every variable, by its checkpoint name.
  """

  features: dict[str, tf.Tensor]
  loss: tf.Tensor
  weight_sum: tf.Tensor
  slices: dict[str, list[Slice]]


@dataclasses.dataclass(frozen=True)
class TrainProgram:
  """One training step of all pods.

  Attributes:
    pods: what each of them is fed. The rows of a step are theirs in order, and
      those of a pod its microbatches' in order.
    step: [], int64: feed the number of steps done before this one. Where it is
      not fed, for the loss of other batches, nothing is dropped.
    microbatch: [], int32: feed which of the step it is, from 0.
    num_microbatches: in a step. Run `accumulate` on each of them but the last,
      and `update` and `metrics`, at once, on that.
    accumulate: adds the gradients and sums of a microbatch to the step's; None
      where there is only one.
    update: updates all variables; changes nothing if grad_norm is infinite or
      no number.
    metrics: of the step, [] float32 each: loss (nats a token), z_loss,
      grad_norm, learning_rate, and those of optim/rms.py.
    gradient_squares: [variables], float32: the sum of squares of the gradient
      of each variable of `parameters`.
    parameters: names of the variables that are trained, in the model's order.
    initialize: draws the first weights.
    devices: where all of it is placed.
  """

  pods: list[PodProgram]
  step: tf.Tensor
  microbatch: tf.Tensor
  num_microbatches: int
  accumulate: tf.Operation | None
  gradient_squares: tf.Tensor
  parameters: list[str]
  update: tf.Operation
  metrics: dict[str, tf.Tensor]
  initialize: tf.Operation
  devices: Devices

  @property
  def slices(self) -> dict[str, list[Slice]]:
    """Those of the first pod: what is saved, for all pods hold the same."""
    return self.pods[0].slices


@dataclasses.dataclass
class _Pod:
  """One pod while its part of the program is built, from first to last."""

  index: int
  mesh: mtf.Mesh
  placement: SlicePlacement
  features: dict[str, tf.Tensor]
  tokens: TokenLosses
  variables: list[mtf.Variable]
  sums: Sums
  accumulations: list[Accumulate]


@dataclasses.dataclass(frozen=True)
class _Update:
  """What B is on one pod: operations, and what to fetch of them."""

  operations: list[AdafactorUpdate]
  learning_rate: tf.Tensor
  weight: mtf.Tensor
  squares: list[mtf.Tensor]
  metrics: dict[str, mtf.Tensor]


class _Builder:
  """Holds what all pods have in common."""

  def __init__(
    self,
    config: PalmConfig,
    mesh_layout: MeshLayout,
    optimizer: AdafactorConfig,
    *,
    pod_batch_size: int,
    seed: int,
    client: str,
  ):
    self._config, self._mesh_layout = config, mesh_layout
    self._optimizer, self._seed = optimizer, seed
    self._pod_batch_size = pod_batch_size
    self._graph = mtf.Graph()
    with tf.device(client):
      none = tf.constant(-1, tf.int64)
      self.step = tf.placeholder_with_default(none, [], "step")
      self.microbatch = tf.placeholder_with_default(0, [], "microbatch")

  def pod(
    self, index: int, devices: Sequence[str], features: Sequence[str]
  ) -> _Pod:
    """Builds A: the sums of pod `index`."""
    mesh = mtf.Mesh(self._graph, f"pod_{index}")
    placement = SlicePlacement(self._mesh_layout, devices)
    num_microbatches = self._mesh_layout.num_microbatches
    dims = model_dims(self._config, self._pod_batch_size // num_microbatches)
    # What is imported onto the mesh is made beside it.
    with tf.device(placement.host):
      fed = placeholders(features, dims)
      batch = import_features(mesh, fed, dims)
      first_row = index * self._pod_batch_size
      first_row += self.microbatch * dims.batch.size
      dropout = self._dropout(mesh, first_row)
      logits = Palm(mesh, self._config, dims, self._seed, dropout).logits(
        batch["inputs"], batch.get("segments")
      )
      tokens = TokenLosses(
        *cross_entropy(logits, batch["targets"]), batch.get("loss_weights")
      )
      variables = [v for v in self._graph.trainable_variables if v.mesh is mesh]
      sums = microbatch_sums(tokens, self._optimizer.z_loss, variables)
      accumulations = []
      if num_microbatches > 1:
        is_first = tf.equal(self.microbatch, 0)
        sums, accumulations = accumulated(sums, variables, is_first)
    return _Pod(
      index, mesh, placement, fed, tokens, variables, sums, accumulations
    )

  def _dropout(self, mesh: mtf.Mesh, first_row: tf.Tensor) -> Dropout | None:
    """Returns what drops activations; in step -1 it drops nothing."""
    if not self._optimizer.dropout:
      return None
    state = self.step, first_row, self.step >= 0
    state = tf.stack([tf.cast(x, tf.int32) for x in state])
    shape = mtf.Shape([mtf.Dimension("dropout_state", 3)])
    state = mtf.import_tf_tensor(mesh, state, shape)
    return Dropout(self._optimizer.dropout, self._seed, state)

  def update(self, pod: _Pod, sums: Sums) -> _Update:
    """Builds B on one pod, from the sums of all of them."""
    optimizer = self._optimizer
    with tf.device(pod.placement.host):
      k = tf.cast(self.step + 1, tf.float32)
      learning_rate = schedule.learning_rate(k, optimizer)
      decay = schedule.second_moment_decay(k, optimizer)
      weight = divisor(sums.weight)
      squares = sums_of_squares(sums.gradients)
      norm = global_norm(squares) / weight
      scalars = [
        clip_factor(norm, optimizer.gradient_clip) / weight,
        *(mtf.import_tf_tensor(pod.mesh, x) for x in (learning_rate, decay)),
      ]
      operations = adafactor_updates(
        pod.variables, sums.gradients, scalars, optimizer
      )
      metrics = {
        "loss": sums.nats / weight,
        "z_loss": optimizer.z_loss * sums.log_z_squares / weight,
        "grad_norm": norm,
      }
    return _Update(operations, learning_rate, weight, squares, metrics)


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
    seed: of the initial weights.
    features: names among FEATURES: what every batch has.
    pods: how many there are, and the dtype of gradients between them.
    devices: of the pods; None for devices of this process.

  Raises:
    UserError: there is no such feature, or inputs or targets are missing.
  """
  devices = devices or local_devices(mesh_layout.num_devices, pods.num_pods)
  builder = _Builder(
    config,
    mesh_layout,
    optimizer,
    pod_batch_size=batch_size // pods.num_pods,
    seed=seed,
    client=devices.client,
  )
  built = [
    builder.pod(index, names, features)
    for index, names in enumerate(devices.pods)
  ]
  sums = exchanged_sums([x.sums for x in built], tf.as_dtype(pods.dcn_dtype))
  updates = [builder.update(*each) for each in zip(built, sums, strict=True)]
  first = updates[0]
  fetched = {
    **first.metrics,
    "weight": first.weight,
    **{f"squares/{i}": x for i, x in enumerate(first.squares)},
  }
  for pod in built:
    nats, weights = pod.tokens.nats, pod.tokens.loss_weights
    fetched[f"loss/{pod.index}"] = weighted_mean(nats, weights)
    fetched[f"weight_sum/{pod.index}"] = weight_sum(nats, weights)
  accumulations = [x for pod in built for x in pod.accumulations]
  lowered = lower(
    {pod.mesh: pod.placement for pod in built},
    fetched,
    [operation for update in updates for operation in update.operations],
    accumulations,
  )
  tensors = lowered.tensors
  with tf.device(built[0].placement.host):
    squares = tf.stack([tensors[x] for x in tensors if "squares/" in x])
    squares /= tf.square(tensors["weight"])
    metrics = {
      **{name: tensors[name] for name in first.metrics},
      "learning_rate": first.learning_rate,
      **rms_by_kind(x for op in first.operations for x in op.sums_of_squares),
    }
  sum_names = {accumulation.sum_name for accumulation in accumulations}
  return TrainProgram(
    pods=[
      PodProgram(
        pod.features,
        tensors[f"loss/{pod.index}"],
        tensors[f"weight_sum/{pod.index}"],
        {name: x for name, x in slices.items() if name not in sum_names},
      )
      for pod, slices in zip(built, lowered.slices, strict=True)
    ],
    step=builder.step,
    microbatch=builder.microbatch,
    num_microbatches=mesh_layout.num_microbatches,
    accumulate=lowered.accumulations if accumulations else None,
    gradient_squares=squares,
    parameters=[variable.name for variable in built[0].variables],
    update=lowered.operations,
    metrics=metrics,
    initialize=lowered.initialize,
    devices=devices,
  )


@dataclasses.dataclass(frozen=True)
class ForwardProgram:
  """The forward pass of one pod.

  Attributes:
    features: what to feed of a batch, by name, in the order asked for.
    logits: [batch, length, vocab], activation dtype; needs no targets and no
      loss_weights.
    loss: [], float32: nats a token.
    weight_sum: as in TrainProgram.
    slices: of every variable, by its checkpoint name.
  """

  features: dict[str, tf.Tensor]
  logits: tf.Tensor
  loss: tf.Tensor
  weight_sum: tf.Tensor
  slices: dict[str, list[Slice]]


def build_forward_program(
  config: PalmConfig,
  mesh_layout: MeshLayout,
  *,
  batch_size: int,
  features: Sequence[str] = REQUIRED_FEATURES,
) -> ForwardProgram:
  """Builds the logits and the loss of a batch in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    batch_size: sequences in one pass.
    features: names among FEATURES: what every batch has.

  Raises:
    UserError: there is no such feature, or inputs or targets are missing.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  (devices,) = local_devices(mesh_layout.num_devices).pods
  placement = SlicePlacement(mesh_layout, devices)
  dims = model_dims(config, batch_size)
  with tf.device(placement.host):
    fed = placeholders(features, dims)
  batch = import_features(mesh, fed, dims)
  loss_weights = batch.get("loss_weights")
  # The first weights are never used: a checkpoint is restored over them.
  logits = Palm(mesh, config, dims, seed=0).logits(
    batch["inputs"], batch.get("segments")
  )
  nats, _ = cross_entropy(logits, batch["targets"])
  lowered = lower(
    {mesh: placement},
    {
      "logits": logits,
      "loss": weighted_mean(nats, loss_weights),
      "weight_sum": weight_sum(batch["targets"], loss_weights),
    },
  )
  return ForwardProgram(
    features=fed, slices=lowered.slices[0], **lowered.tensors
  )
