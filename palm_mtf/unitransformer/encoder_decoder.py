# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mesh TensorFlow's encoder-decoder, such as T5, as a MODEL_FUNCTION.

A row of a batch holds, for each of its examples, the inputs and then the
targets. The encoder reads the row with all targets masked; the decoder reads it
with all inputs masked. T5 packs inputs and targets into separate rows instead,
without masked tokens between the examples. The logits are the same, because
attention and relative positions depend only on tokens of the same example.
"""

from collections.abc import Mapping

from mesh_tensorflow.transformer import transformer

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError


def bitransformer(
  features: Mapping[str, mtf.Tensor], dtype: tf.DType
) -> mtf.Tensor:
  """Returns the logits of targets, [batch, length, vocab] in `dtype`.

  Gin configures the model (`transformer.make_bitransformer`), as in
  gin/mesh_tensorflow/t5.gin.

  Args:
    features: {name: tensor}, [batch, length] each; programs/features.py lists
      the names.
    dtype: dtype of activations; variables are float32.

  Raises UserError if texts have no inputs, because OBJECTIVE is "causal".
  """
  if "prefix" not in features:
    raise UserError(
      'OBJECTIVE = "causal": an encoder reads inputs, which texts do not have; '
      'set "span_corruption" or "prefix_lm". Examples of a TASK keep theirs.'
    )
  is_target = mtf.cast(mtf.greater(features["loss_weights"], 0.0), tf.int32)
  tokens, segments = features["targets"], features["segments"]
  model = transformer.make_bitransformer()
  logits, _ = model.call_simple(
    tokens * (1 - is_target),
    tokens * is_target,
    compute_loss=False,
    variable_dtype=mtf.VariableDType(tf.float32, tf.float32, dtype),
    encoder_sequence_id=segments * (1 - is_target),
    decoder_sequence_id=segments * is_target,
  )
  return logits
