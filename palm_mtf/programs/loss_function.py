# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A model and its loss for a training program: the interface, and PaLM's.

If microbatches differ in weight, the mean of their mean losses is not the mean
over the tokens of a step. A loss function therefore returns a sum of losses and
a sum of weights. pod.py adds up both over the step, and then divides.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from palm_mtf._tf import mtf, tf
from palm_mtf.architecture.parameters import first_stage_in_backward
from palm_mtf.config import LossConfig, MeshLayout, ModelConfig
from palm_mtf.config.neighbours import neighbour_tokens
from palm_mtf.mesh.stages import send
from palm_mtf.model.dims import model_dims
from palm_mtf.model.distillation import teacher_terms
from palm_mtf.model.dropout import Dropout
from palm_mtf.model.loss import cross_entropy, weight_sum, weighted_sum
from palm_mtf.model.palm import Palm
from palm_mtf.model.preference import preference_terms
from palm_mtf.model.weights import TrainedWeights, palm_variables
from palm_mtf.programs.features import Feature, Stage, find_palm_features
from palm_mtf.steps.plan import stage_layers


@dataclasses.dataclass(frozen=True)
class LossSums:
  """Sums over the rows of a microbatch, [] float32 each, on one mesh."""

  # Sum of each term of the loss, by the term's name; "loss" is first. Training
  # follows the sum of the gradients of all terms. Terms without gradients are
  # metrics; a teacher changes the weight of gradients, not of terms.
  terms: Mapping[str, mtf.Tensor]
  # Sum of the loss weights of all targets; `terms` divided by it are means.
  weight: mtf.Tensor


class LossFunction(Protocol):
  """A model and its loss, as `build_program` (train_program.py) takes them."""

  features: Mapping[str, Feature]  # dtype and shape in a microbatch
  has_dropout: bool  # whether `build_sums` needs `Stage.dropout_state`
  first_backward: int  # the first stage with a backward pass (`plan_step`)

  def build_sums(self, stages: Sequence[Stage]) -> LossSums:
    """Makes the variables of a pod's model; returns a microbatch's loss.

    Args:
      stages: mesh and inputs of each pipeline stage; then of the head (last
        norm, logits and loss), which runs on the mesh of the first stage.
        Without a pipeline, the only item is for the whole model.
    """


class _Settings(Protocol):
  """The settings of a step that the loss depends on."""

  @property
  def model(self) -> ModelConfig: ...

  @property
  def mesh_layout(self) -> MeshLayout: ...

  @property
  def loss(self) -> LossConfig: ...


class PalmLoss:
  """PaLM and its loss: cross-entropy and z-loss of every token.

  Attributes:
    step, seed, frozen: what the constructor is given.
  """

  def __init__(
    self,
    step: _Settings,
    feature_names: Sequence[str],
    *,
    num_rows: int,
    seed: int,
    frozen: Sequence[str] = (),
    pass_on: Callable[[mtf.Tensor, mtf.Mesh], mtf.Tensor] = send,
    layers: Sequence[range] | None = None,
  ):
    """Checks the features; UserError if one is unknown or missing.

    Args:
      step: model, mesh of a pod (checked against the model) and loss.
      feature_names: keys of FEATURE_DTYPES that every batch has.
      num_rows: sequences in a microbatch.
      seed: seed of the initial weights and of dropout.
      frozen: FROZEN, patterns of parameters that are not trained.
      pass_on: sends the residual stream to the mesh of a stage or of the head.
      layers: numbers of the layers that each stage computes; None for all
        layers, an equal number per stage.
    """
    self.step, self.seed, self.frozen = step, seed, frozen
    self._config, self._loss = step.model, step.loss
    self._pass_on, self._layers = pass_on, layers
    self.has_dropout = step.loss.dropout > 0
    self.first_backward = first_stage_in_backward(
      step.model, frozen, step.mesh_layout.stages
    )
    self._dims = model_dims(step.model, num_rows, step.mesh_layout)
    self._is_float32 = step.mesh_layout.gradient_dtype == "float32"
    self.features = find_palm_features(
      feature_names,
      self._dims,
      step.loss.teacher_tokens,
      neighbour_tokens(step.model),
    )

  def build_sums(self, stages: Sequence[Stage]) -> LossSums:
    """Makes the variables of a pod's model; returns a microbatch's loss."""
    config, head = self._config, stages[-1]
    stages = stages[:-1] or stages
    meshes = [x.mesh for x in stages]
    layers = self._layers or stage_layers(config.num_layers, len(stages))
    variables = palm_variables(
      *(meshes, config, self._dims, self.seed, layers),
      frozen=self.frozen,
      loss=self._loss,
    )
    models = [self._build_model(x, variables) for x in stages]
    first = stages[0].batch
    x = models[0].embed(first["inputs"], first.get("segments"))
    for stage, model, own in zip(stages, models, layers, strict=True):
      x = model.run_blocks(
        self._pass_on(x, stage.mesh),
        own,
        stage.batch.get("segments"),
        stage.batch.get("prefix"),
      )
    x = models[0].last_norm(self._pass_on(x, head.mesh))
    dtype = tf.as_dtype(config.activation_dtype)
    return token_sums(models[0].unembed(x), head.batch, self._loss, dtype)

  def _build_model(
    self, stage: Stage, variables: Mapping[str, mtf.Tensor]
  ) -> Palm:
    """Returns the model on a stage's mesh, to run only the stage's layers."""
    dropout = None
    if stage.dropout_state is not None:
      rate = self._loss.dropout
      dropout = Dropout(rate, self.seed, stage.dropout_state)
    weights = TrainedWeights(
      stage.mesh,
      self._config,
      self._dims,
      gradient_dtype=tf.float32 if self._is_float32 else None,
      variables=variables,
      loss=self._loss,
    )
    with tf.device(stage.placement.cpu):
      given = self._config, self._dims, weights, dropout
      return Palm(*given, neighbours=stage.batch.get("neighbours"))


def token_sums(
  logits: mtf.Tensor,
  batch: Mapping[str, mtf.Tensor],
  loss: LossConfig,
  dtype: tf.DType,
) -> LossSums:
  """Returns cross-entropy and z-loss of every token, weighted.

  With PREFERENCE_BETA, every position of a row has the loss of the row's pair
  instead. With TEACHER, the divergence from the teacher is a further term.

  `logits` is [batch, length, vocab], any float dtype. `batch` has the features
  "targets" and, if weights differ, "loss_weights". `dtype` is the dtype of
  activations.
  """
  # Compute the gradient of the logits in the dtype of the activations, because
  # that gradient is multiplied by activations.
  token_loss, log_z = cross_entropy(logits, batch["targets"], dtype)
  loss_weights = batch.get("loss_weights")
  terms = {"loss": token_loss, "z_loss": loss.z_loss * mtf.square(log_z)}
  if loss.preference_beta is not None:
    terms |= preference_terms(
      token_loss, loss_weights, batch["reference"], loss.preference_beta
    )
    length = token_loss.shape.dims[-1].size
    z_loss = weighted_sum(terms.pop("z_loss"), mtf.square(loss_weights))
    sums = {name: length * mtf.reduce_sum(x) for name, x in terms.items()}
    return LossSums(sums | {"z_loss": z_loss}, weight_sum(token_loss, None))
  if loss.teacher is not None:
    terms |= teacher_terms(logits, token_loss, log_z, batch, loss, dtype)
  return LossSums(
    {name: weighted_sum(x, loss_weights) for name, x in terms.items()},
    weight_sum(token_loss, loss_weights),
  )
