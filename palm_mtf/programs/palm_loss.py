# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss function of PaLM: cross-entropy and z-loss of every token."""

from collections.abc import Mapping, Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.config.optimizer import AdafactorConfig
from palm_mtf.model.dims import model_dims
from palm_mtf.model.dropout import Dropout
from palm_mtf.model.loss import cross_entropy, weight_sum, weighted_sum
from palm_mtf.model.palm import Palm
from palm_mtf.model.weights import TrainedWeights
from palm_mtf.programs.features import palm_features
from palm_mtf.programs.loss_function import LossSums


class PalmLoss:
  """`LossFunction` of PaLM.

  Attributes:
    features: features of a microbatch, by name.
  """

  def __init__(
    self,
    config: PalmConfig,
    mesh_layout: MeshLayout,
    optimizer: AdafactorConfig,
    feature_names: Sequence[str],
    *,
    num_rows: int,
    seed: int,
  ):
    """Readies the dimensions.

    Args:
      config: architecture.
      mesh_layout: axes and layout rules of a pod, checked against `config`.
      optimizer: Z_LOSS and DROPOUT are read.
      feature_names: names among FEATURE_DTYPES that every batch has.
      num_rows: sequences in a microbatch.
      seed: seed of the initial weights and of dropout.

    Raises:
      UserError: there is no such feature, or inputs or targets are missing.
    """
    self._config, self._optimizer, self._seed = config, optimizer, seed
    self._dims = model_dims(config, num_rows, mesh_layout)
    self._is_float32 = mesh_layout.gradient_dtype == "float32"
    self.features = palm_features(feature_names, self._dims)

  def sums(
    self,
    mesh: mtf.Mesh,
    batch: Mapping[str, mtf.Tensor],
    dropout_state: tf.Tensor,
  ) -> LossSums:
    """Makes the variables, and sums over tokens; see `LossFunction`."""
    config, dims = self._config, self._dims
    dropout = self._dropout(mesh, dropout_state)
    weights = TrainedWeights(
      mesh,
      config,
      dims,
      self._seed,
      gradient_dtype=tf.float32 if self._is_float32 else None,
    )
    logits = Palm(config, dims, weights, dropout).logits(
      batch["inputs"], batch.get("segments"), batch.get("prefix")
    )
    # What is multiplied by activations is rounded as they are.
    token_loss, log_z = cross_entropy(
      logits, batch["targets"], tf.as_dtype(config.activation_dtype)
    )
    loss_weights = batch.get("loss_weights")
    z_loss = self._optimizer.z_loss * mtf.square(log_z)
    return LossSums(
      {
        "loss": weighted_sum(token_loss, loss_weights),
        "z_loss": weighted_sum(z_loss, loss_weights),
      },
      weight_sum(token_loss, loss_weights),
    )

  def _dropout(self, mesh: mtf.Mesh, state: tf.Tensor) -> Dropout | None:
    """Returns the dropout of activations, if there is any."""
    if not self._optimizer.dropout:
      return None
    shape = mtf.Shape([mtf.Dimension("dropout_state", 3)])
    on_mesh = mtf.import_tf_tensor(mesh, state, shape)
    return Dropout(self._optimizer.dropout, self._seed, on_mesh)
