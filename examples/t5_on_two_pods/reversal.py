# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model function, and a task: to reverse a row of tokens."""

import gin
import mesh_tensorflow as mtf
import numpy as np
from mesh_tensorflow.transformer import transformer


@gin.configurable
def t5_loss(
  mesh: mtf.Mesh, features: dict[str, mtf.Tensor], vocab_size: int
) -> mtf.Tensor:
  """Returns the mean loss over all targets, [] float32."""
  del mesh  # that of the features
  model = transformer.make_bitransformer(
    input_vocab_size=vocab_size, output_vocab_size=vocab_size
  )
  _, loss = model.call_simple(
    features["inputs"], features["targets"], compute_loss=True
  )
  return loss


@gin.configurable
def reversal_features(length: int) -> dict[str, tuple[str, str]]:
  """Returns dtype and dimensions of a row of each feature."""
  return dict.fromkeys(("inputs", "targets"), ("int32", f"length:{length}"))


@gin.configurable
def reversed_rows(
  step: int, batch_size: int, length: int, vocab_size: int
) -> dict[str, np.ndarray]:
  """Returns the batch of a step, [batch_size, length] each."""
  rng = np.random.default_rng(step)
  inputs = rng.integers(1, vocab_size, (batch_size, length))
  return {"inputs": inputs, "targets": inputs[:, ::-1]}
