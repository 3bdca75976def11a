# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Computes the logits and the loss of a batch on one pod."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config import MeshLayout, ModelConfig
from palm_mtf.config.neighbours import neighbour_tokens
from palm_mtf.mesh.cpu_gpu import local_devices
from palm_mtf.model.dims import model_dims
from palm_mtf.model.loss import cross_entropy, weight_sum, weighted_mean
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.features import (
  REQUIRED_FEATURES,
  find_palm_features,
  import_features,
  make_placeholders,
)
from palm_mtf.programs.step_programs import LossProgram


def build_forward_program(
  config: ModelConfig,
  mesh_layout: MeshLayout,
  *,
  batch_size: int,
  features: Sequence[str] = REQUIRED_FEATURES,
) -> LossProgram:
  """Builds the logits and the loss of a batch in the current tf.Graph.

  A call that fetches only the logits need not feed "targets" and
  "loss_weights".

  Args:
    config: architecture.
    mesh_layout: devices and layout rules, checked against `config`.
    batch_size: sequences in one pass.
    features: keys of FEATURE_DTYPES that every batch has; UserError if one is
      unknown, or inputs or targets are missing.
  """
  mesh = mtf.Mesh(mtf.Graph(), "pod")
  placement = local_devices(mesh_layout.num_devices).placement(mesh_layout, 0)
  dims = model_dims(config, batch_size, mesh_layout)
  specs = find_palm_features(
    features, dims, neighbour_tokens=neighbour_tokens(config)
  )
  with tf.device(placement.cpu):
    fed = make_placeholders(specs)
  batch = import_features(mesh, placement, {placement.cpu: fed}, specs)
  loss_weights = batch.get("loss_weights")
  weights = TrainedWeights(mesh, config, dims)
  palm = Palm(config, dims, weights, neighbours=batch.get("neighbours"))
  logits = palm.logits(
    batch["inputs"], batch.get("segments"), batch.get("prefix")
  )
  token_loss, _ = cross_entropy(logits, batch["targets"])
  outputs = {
    "logits": logits,
    "loss": weighted_mean(token_loss, loss_weights),
    "weight_sum": weight_sum(batch["targets"], loss_weights),
  }
  lowering = placement.lower({mesh: placement})
  lowered, _ = lowering.call(outputs)
  # Drop the logits of embedding rows that only pad the vocabulary.
  lowered["logits"] = lowered["logits"][..., : config.vocab_size]
  return LossProgram(features=fed, slices=lowering.slices[0], **lowered)
