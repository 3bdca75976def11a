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
from palm_mtf.model.loss import cross_entropy, weight_sum, weighted_mean
from palm_mtf.model.palm import Palm
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import AdafactorUpdate
from palm_mtf.optim.clip import clip_factor, global_norm, sums_of_squares

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
    features: what to feed of a batch, by name, in the order asked for.
    step: [], int64: feed the number of steps done before this one.
    metrics: [] float32 each: loss (nats a token), z_loss, grad_norm,
      learning_rate. Fetching loss alone runs the forward pass alone.
    gradient_squares: [variables], float32: the sum of squares of the gradient
      of each variable of `parameters`.
    parameters: names of the variables that are trained, in the model's order.
    weight_sum: [], float32: how many tokens the loss is the mean of. The mean
      loss of several batches is that of their losses, weighted by it.
    update: runs the whole step; it changes nothing if grad_norm is infinite or
      no number.
    initialize: draws the first weights.
    slices: of every variable, by its checkpoint name.
  """

  features: dict[str, tf.Tensor]
  step: tf.Tensor
  metrics: dict[str, tf.Tensor]
  gradient_squares: tf.Tensor
  parameters: list[str]
  weight_sum: tf.Tensor
  update: tf.Operation
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
  dims = model_dims(config, batch_size)
  placeholders = _placeholders(features, dims)
  step = tf.placeholder(tf.int64, [], "step")
  k = tf.cast(step + 1, tf.float32)
  learning_rate = schedule.learning_rate(k, optimizer)

  batch = _import_features(mesh, placeholders, dims)
  loss_weights = batch.get("loss_weights")
  logits = Palm(mesh, config, dims, seed).logits(
    batch["inputs"], batch.get("segments")
  )
  nats, log_z = cross_entropy(logits, batch["targets"])
  loss = weighted_mean(nats, loss_weights)
  z_loss = optimizer.z_loss * weighted_mean(mtf.square(log_z), loss_weights)

  variables = list(mesh.graph.trainable_variables)
  gradients = mtf.gradients([loss + z_loss], [v.value for v in variables])
  squares = sums_of_squares(gradients)
  grad_norm = global_norm(squares)
  scalars = [
    clip_factor(grad_norm, optimizer.gradient_clip),
    mtf.import_tf_tensor(mesh, learning_rate),
    mtf.import_tf_tensor(mesh, schedule.second_moment_decay(k, optimizer)),
  ]
  updates = [
    AdafactorUpdate(variable, gradient, scalars, optimizer)
    for variable, gradient in zip(variables, gradients, strict=True)
  ]
  metrics = {"loss": loss, "z_loss": z_loss, "grad_norm": grad_norm}
  names = [variable.name for variable in variables]
  fetched = {
    **metrics,
    "weight_sum": weight_sum(batch["targets"], loss_weights),
    **{f"{name}/squares": x for name, x in zip(names, squares, strict=True)},
  }
  lowered = lower(mesh, _placement(mesh_layout), fetched, updates)
  metrics = {name: lowered.tensors[name] for name in metrics}
  return TrainProgram(
    features=placeholders,
    step=step,
    metrics={**metrics, "learning_rate": learning_rate},
    gradient_squares=tf.stack(
      [lowered.tensors[f"{name}/squares"] for name in names]
    ),
    parameters=names,
    weight_sum=lowered.tensors["weight_sum"],
    update=lowered.operations,
    initialize=lowered.initialize,
    slices=lowered.slices,
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
