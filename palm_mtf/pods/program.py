# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graphs that a client runs: a training step, and a forward pass.

This is where model, optimizer and mesh meet. A program is plain TensorFlow:
what to feed, what to fetch and which slices hold its variables; sessions and
files are the business of the run layer.

A batch is fed by its features, [batch, length] each:

  inputs         int32    the tokens before `targets`
  targets        int32    the tokens to predict
  segments       int32    attention stays among equal numbers; else among a row
  loss_weights   float32  of each target in the mean loss; else 1
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config import AdafactorConfig, PalmConfig
from palm_mtf.errors import UserError, check_choice
from palm_mtf.layout import MeshLayout
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.placement import Slice, SlicePlacement, local_devices
from palm_mtf.model.dims import Dims, model_dims
from palm_mtf.model.dropout import Dropout
from palm_mtf.model.loss import cross_entropy, weight_sum, weighted_mean
from palm_mtf.model.palm import Palm
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import AdafactorUpdate, adafactor_updates
from palm_mtf.optim.clip import clip_factor, global_norm, sums_of_squares
from palm_mtf.optim.rms import rms_by_kind
from palm_mtf.pods.microbatches import (
  StepGradients,
  TokenLosses,
  step_gradients,
)

FEATURES = {
  "inputs": tf.int32,
  "targets": tf.int32,
  "segments": tf.int32,
  "loss_weights": tf.float32,
}
REQUIRED_FEATURES = ("inputs", "targets")


@dataclasses.dataclass(frozen=True)
class TrainProgram:
  """One training step of one pod.

  Attributes:
    features: what to feed of a microbatch, by name, in the order asked for.
    step: [], int64: feed the number of steps done before this one. Where it is
      not fed, for the loss of other batches, nothing is dropped.
    microbatch: [], int32: feed which of the step it is, from 0.
    num_microbatches: in a step. Where there are several, run `accumulate` on
      each of them, then `update` and `metrics`, which need no features; where
      there is one, `update` alone.
    accumulate: adds the gradients and sums of a microbatch to the step's; None
      where there is only one.
    update: updates all variables. Where loss, z_loss or grad_norm is infinite
      or no number it raises InvalidArgumentError, and changes nothing.
    losses: of the step, [] float32 each: loss (nats a token), z_loss and
      grad_norm.
    metrics: of the step, [] float32 each: `losses`, learning_rate, and those of
      optim/rms.py, which raise like `update`.
    gradient_squares: [variables], float32: the sum of squares of the gradient
      of each variable of `parameters`.
    parameters: names of the variables that are trained, in the model's order.
    loss: [], float32: nats a token of the microbatch; fetched alone it runs the
      forward pass alone.
    weight_sum: [], float32: how many tokens the loss is the mean of. The mean
      loss of several batches is that of their losses, weighted by it.
    initialize: draws the first weights.
    slices: of every variable, by its checkpoint name.
  """

  features: dict[str, tf.Tensor]
  step: tf.Tensor
  microbatch: tf.Tensor
  num_microbatches: int
  accumulate: tf.Operation | None
  gradient_squares: tf.Tensor
  parameters: list[str]
  update: tf.Operation
  losses: dict[str, tf.Tensor]
  metrics: dict[str, tf.Tensor]
  loss: tf.Tensor
  weight_sum: tf.Tensor
  initialize: tf.Operation
  slices: dict[str, list[Slice]]


def _new_mesh(name: str) -> mtf.Mesh:
  return mtf.Mesh(mtf.Graph(), name)


def _placement(mesh_layout: MeshLayout) -> SlicePlacement:
  return SlicePlacement(mesh_layout, local_devices(mesh_layout.num_devices))


def _placeholders(names: Sequence[str], dims: Dims) -> dict[str, tf.Tensor]:
  """Returns what to feed for each feature; raises UserError for a wrong one."""
  for name in names:
    check_choice("feature", name, FEATURES)
  for name in REQUIRED_FEATURES:
    if name not in names:
      raise UserError(
        f"features = {', '.join(names)}: there is no {name}; every batch has "
        f"{' and '.join(REQUIRED_FEATURES)}."
      )
  shape = [dims.batch.size, dims.length.size]
  return {name: tf.placeholder(FEATURES[name], shape, name) for name in names}


def _import_features(
  mesh: mtf.Mesh, features: dict[str, tf.Tensor], dims: Dims
) -> dict[str, mtf.Tensor]:
  shape = mtf.Shape([dims.batch, dims.length])
  return {
    name: mtf.import_tf_tensor(mesh, tensor, shape)
    for name, tensor in features.items()
  }


def _dropout(
  mesh: mtf.Mesh, rate: float, seed: int, step: tf.Tensor, first_row: tf.Tensor
) -> Dropout | None:
  """Returns what drops activations; in step -1 it drops nothing."""
  if not rate:
    return None
  state = tf.stack([tf.cast(x, tf.int32) for x in (step, first_row, step >= 0)])
  shape = mtf.Shape([mtf.Dimension("dropout_state", 3)])
  return Dropout(rate, seed, mtf.import_tf_tensor(mesh, state, shape))


def build_train_program(
  config: PalmConfig,
  mesh_layout: MeshLayout,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  seed: int,
  features: Sequence[str] = REQUIRED_FEATURES,
) -> TrainProgram:
  """Builds forward, backward and update in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    optimizer: schedule, clipping, decay and z-loss.
    batch_size: sequences in one step.
    seed: of the initial weights.
    features: names among FEATURES: what every batch has.

  Raises:
    UserError: there is no such feature, or inputs or targets are missing.
  """
  mesh = _new_mesh("pod")
  dims = model_dims(config, batch_size // mesh_layout.num_microbatches)
  placeholders = _placeholders(features, dims)
  step = tf.placeholder_with_default(tf.constant(-1, tf.int64), [], "step")
  microbatch = tf.placeholder_with_default(0, [], "microbatch")
  batch = _import_features(mesh, placeholders, dims)
  first_row = microbatch * dims.batch.size
  dropout = _dropout(mesh, optimizer.dropout, seed, step, first_row)
  logits = Palm(mesh, config, dims, seed, dropout).logits(
    batch["inputs"], batch.get("segments")
  )
  tokens = TokenLosses(
    *cross_entropy(logits, batch["targets"]), batch.get("loss_weights")
  )
  variables = list(mesh.graph.trainable_variables)
  total = step_gradients(
    tokens,
    optimizer.z_loss,
    variables,
    num_microbatches=mesh_layout.num_microbatches,
    is_first=tf.equal(microbatch, 0),
  )
  k = tf.cast(step + 1, tf.float32)
  learning_rate = schedule.learning_rate(k, optimizer)
  decay = schedule.second_moment_decay(k, optimizer)
  squares = sums_of_squares(total.gradients)
  grad_norm, clip = _clipping(squares, total, optimizer)
  imported = [mtf.import_tf_tensor(mesh, x) for x in (learning_rate, decay)]
  updates = adafactor_updates(
    variables, total.gradients, [clip, *imported], optimizer
  )
  losses = {"loss": total.loss, "z_loss": total.z_loss, "grad_norm": grad_norm}
  fetched = {
    **losses,
    **{f"squares/{i}": x for i, x in enumerate(squares)},
    "microbatch_loss": weighted_mean(tokens.nats, tokens.loss_weights),
    "weight_sum": weight_sum(tokens.nats, tokens.loss_weights),
  }
  placement = _placement(mesh_layout)
  lowered = lower(mesh, placement, fetched, updates, total.accumulations)
  losses = {name: lowered.tensors[name] for name in losses}
  squares = [lowered.tensors[f"squares/{i}"] for i in range(len(squares))]
  sums = {accumulation.sum_name for accumulation in total.accumulations}
  return TrainProgram(
    features=placeholders,
    step=step,
    microbatch=microbatch,
    num_microbatches=mesh_layout.num_microbatches,
    accumulate=lowered.accumulations if total.accumulations else None,
    gradient_squares=tf.stack(squares),
    parameters=[variable.name for variable in variables],
    update=lowered.operations,
    losses=losses,
    metrics={**losses, "learning_rate": learning_rate, **_rms(updates)},
    loss=lowered.tensors["microbatch_loss"],
    weight_sum=lowered.tensors["weight_sum"],
    initialize=lowered.initialize,
    slices={n: s for n, s in lowered.slices.items() if n not in sums},
  )


def _clipping(
  squares: Sequence[mtf.Tensor],
  total: StepGradients,
  optimizer: AdafactorConfig,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Returns the global norm and the factor of each gradient: [] float32."""
  norm, losses = global_norm(squares), [total.loss, total.z_loss]
  if total.multiple is None:
    return norm, clip_factor(norm, optimizer.gradient_clip, losses)
  norm /= total.multiple
  clip = clip_factor(norm, optimizer.gradient_clip, losses)
  return norm, clip / total.multiple


def _rms(updates: Sequence[AdafactorUpdate]) -> dict[str, tf.Tensor]:
  return rms_by_kind(
    each for update in updates for each in update.sums_of_squares
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
  mesh = _new_mesh("pod")
  dims = model_dims(config, batch_size)
  placeholders = _placeholders(features, dims)
  batch = _import_features(mesh, placeholders, dims)
  loss_weights = batch.get("loss_weights")
  # The first weights are never used: a checkpoint is restored over them.
  logits = Palm(mesh, config, dims, seed=0).logits(
    batch["inputs"], batch.get("segments")
  )
  nats, _ = cross_entropy(logits, batch["targets"])
  lowered = lower(
    mesh,
    _placement(mesh_layout),
    {
      "logits": logits,
      "loss": weighted_mean(nats, loss_weights),
      "weight_sum": weight_sum(batch["targets"], loss_weights),
    },
  )
  return ForwardProgram(
    features=placeholders, slices=lowered.slices, **lowered.tensors
  )
