# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What every layer asks of the model that calls it."""

from mesh_tensorflow.transformer import transformer

from palm_mtf.errors import UserError


def check_one_model(context: transformer.Context) -> None:
  """Raises UserError for an ensemble: each of its models has own weights."""
  ensemble = context.model.ensemble_dim
  if ensemble:
    raise UserError(
      f"Unitransformer.ensemble = {ensemble.size}: the layers of "
      "palm_mtf.unitransformer have the weights of one model; leave ensemble "
      "out."
    )
