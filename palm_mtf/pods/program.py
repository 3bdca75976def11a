# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graphs that a client runs: a training step, and a forward pass.

This is where model, optimizer and mesh meet. A program is plain TensorFlow:
what to feed, what to fetch and which slices hold its variables; sessions and
files are the business of the run layer.
"""

import dataclasses

from palm_mtf._tf import mtf, tf
from palm_mtf.config import AdafactorConfig, PalmConfig
from palm_mtf.layout import MeshLayout
from palm_mtf.mesh.lowering import lower
from palm_mtf.mesh.placement import Slice, SlicePlacement, local_devices
from palm_mtf.model.dims import Dims, model_dims
from palm_mtf.model.loss import cross_entropy
from palm_mtf.model.palm import Palm
from palm_mtf.optim import schedule
from palm_mtf.optim.adafactor import AdafactorUpdate
from palm_mtf.optim.clip import clip_factor, global_norm


@dataclasses.dataclass(frozen=True)
class TrainProgram:
  """One training step of one pod.

  Attributes:
    inputs: [batch, length], int32: feed the tokens before `targets`.
    targets: [batch, length], int32: feed the tokens to predict.
    step: [], int64: feed the number of steps done before this one.
    metrics: [] float32 each: loss (nats a token), z_loss, grad_norm,
      learning_rate. Fetching loss alone runs the forward pass alone.
    update: runs the whole step.
    initialize: draws the first weights.
    slices: of every variable, by its checkpoint name.
  """

  inputs: tf.Tensor
  targets: tf.Tensor
  step: tf.Tensor
  metrics: dict[str, tf.Tensor]
  update: tf.Operation
  initialize: tf.Operation
  slices: dict[str, list[Slice]]


def _new_mesh(name: str) -> mtf.Mesh:
  return mtf.Mesh(mtf.Graph(), name)


def _placement(mesh_layout: MeshLayout) -> SlicePlacement:
  return SlicePlacement(mesh_layout, local_devices(mesh_layout.num_devices))


def _token_placeholder(name: str, dims: Dims) -> tf.Tensor:
  return tf.placeholder(tf.int32, [dims.batch.size, dims.length.size], name)


def _import_tokens(mesh: mtf.Mesh, tokens: tf.Tensor, dims: Dims) -> mtf.Tensor:
  return mtf.import_tf_tensor(
    mesh, tokens, mtf.Shape([dims.batch, dims.length])
  )


def build_train_program(
  config: PalmConfig,
  mesh_layout: MeshLayout,
  optimizer: AdafactorConfig,
  *,
  batch_size: int,
  seed: int,
) -> TrainProgram:
  """Builds forward, backward and update in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    optimizer: schedule, clipping, decay and z-loss.
    batch_size: sequences in one step.
    seed: of the initial weights.
  """
  mesh = _new_mesh("pod")
  dims = model_dims(config, batch_size)
  inputs = _token_placeholder("inputs", dims)
  targets = _token_placeholder("targets", dims)
  step = tf.placeholder(tf.int64, [], "step")
  k = tf.cast(step + 1, tf.float32)
  learning_rate = schedule.learning_rate(k, optimizer)

  logits = Palm(mesh, config, dims, seed).logits(
    _import_tokens(mesh, inputs, dims)
  )
  nats, log_z = cross_entropy(logits, _import_tokens(mesh, targets, dims))
  loss = mtf.reduce_mean(nats)
  z_loss = optimizer.z_loss * mtf.reduce_mean(mtf.square(log_z))

  variables = list(mesh.graph.trainable_variables)
  gradients = mtf.gradients([loss + z_loss], [v.value for v in variables])
  grad_norm = global_norm(gradients)
  scalars = [
    clip_factor(grad_norm, optimizer.gradient_clip),
    mtf.import_tf_tensor(mesh, learning_rate),
    mtf.import_tf_tensor(mesh, schedule.second_moment_decay(k, optimizer)),
  ]
  updates = [
    AdafactorUpdate(variable, gradient, scalars, optimizer)
    for variable, gradient in zip(variables, gradients, strict=True)
  ]
  lowered = lower(
    mesh,
    _placement(mesh_layout),
    {"loss": loss, "z_loss": z_loss, "grad_norm": grad_norm},
    updates,
  )
  return TrainProgram(
    inputs=inputs,
    targets=targets,
    step=step,
    metrics={**lowered.tensors, "learning_rate": learning_rate},
    update=lowered.operations,
    initialize=lowered.initialize,
    slices=lowered.slices,
  )


@dataclasses.dataclass(frozen=True)
class ForwardProgram:
  """The forward pass of one pod.

  Attributes:
    inputs: [batch, length], int32: feed the tokens before `targets`.
    targets: [batch, length], int32: feed the tokens to predict.
    logits: [batch, length, vocab], activation dtype.
    nats: [batch, length], float32: -log p of each target.
    slices: of every variable, by its checkpoint name.
  """

  inputs: tf.Tensor
  targets: tf.Tensor
  logits: tf.Tensor
  nats: tf.Tensor
  slices: dict[str, list[Slice]]


def build_forward_program(
  config: PalmConfig, mesh_layout: MeshLayout, *, batch_size: int
) -> ForwardProgram:
  """Builds logits and loss of every token in the current tf.Graph.

  Args:
    config: the architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    batch_size: sequences in one pass.
  """
  mesh = _new_mesh("pod")
  dims = model_dims(config, batch_size)
  inputs = _token_placeholder("inputs", dims)
  targets = _token_placeholder("targets", dims)
  # The first weights are never used: a checkpoint is restored over them.
  logits = Palm(mesh, config, dims, seed=0).logits(
    _import_tokens(mesh, inputs, dims)
  )
  nats, _ = cross_entropy(logits, _import_tokens(mesh, targets, dims))
  lowered = lower(
    mesh, _placement(mesh_layout), {"logits": logits, "nats": nats}
  )
  return ForwardProgram(
    inputs=inputs,
    targets=targets,
    logits=lowered.tensors["logits"],
    nats=lowered.tensors["nats"],
    slices=lowered.slices,
  )
