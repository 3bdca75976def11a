# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The features of a batch that a pod is fed, [batch, length] each."""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError, check_choice
from palm_mtf.model.dims import Dims

FEATURE_DTYPES = {
  "inputs": tf.int32,  # the tokens before `targets`
  "targets": tf.int32,  # the tokens to predict
  "segments": tf.int32,  # attention stays among equal numbers; else in a row
  "loss_weights": tf.float32,  # of each target in the mean loss; else 1
}
REQUIRED_FEATURES = ("inputs", "targets")


def placeholders(names: Sequence[str], dims: Dims) -> dict[str, tf.Tensor]:
  """Returns the placeholder of each feature, on the current device.

  Raises:
    UserError: there is no such feature, or inputs or targets are missing.
  """
  for name in names:
    check_choice("feature", name, FEATURE_DTYPES)
  for name in REQUIRED_FEATURES:
    if name not in names:
      raise UserError(
        f"features = {', '.join(names)}: there is no {name}; every batch has "
        f"{' and '.join(REQUIRED_FEATURES)}."
      )
  shape = [dims.batch.size, dims.length.size]
  return {
    name: tf.placeholder(FEATURE_DTYPES[name], shape, name) for name in names
  }


def import_features(
  mesh: mtf.Mesh, features: dict[str, tf.Tensor], dims: Dims
) -> dict[str, mtf.Tensor]:
  """Returns the features on a mesh, [batch, length] each."""
  # host -> each device: its rows
  shape = mtf.Shape([dims.batch, dims.length])
  return {
    name: mtf.import_tf_tensor(mesh, tensor, shape)
    for name, tensor in features.items()
  }
