# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The graph that scores: how likely each token of some rows is.

It reads rows as decoding reads prompts, in one pass (decode/decoder.py), with
the same weights, so that one copy of them serves both.
"""

import dataclasses

from palm_mtf._tf import tf
from palm_mtf.decode.batch_sharding import join_rows, split_rows
from palm_mtf.programs.generate_program import DecodeModel


@dataclasses.dataclass(frozen=True)
class ScoreProgram:
  """Scores rows of one length.

  Attributes:
    inputs: feed [rows, length], int32: the tokens before `targets`.
    targets: feed [rows, length], int32.
    token_loss: [rows, length], float32: -log p of each target.
  """

  inputs: tf.Tensor
  targets: tf.Tensor
  token_loss: tf.Tensor


def build_score_program(
  model: DecodeModel, num_rows: int, length: int
) -> ScoreProgram:
  """Builds the program for some sizes in the current tf.Graph.

  Args:
    model: model that `build_decode_model` returned.
    num_rows: divisible by the mesh axis of `batch`.
    length: tokens in a row, at most the model's sequence_length.
  """
  impl, decoder = model.placement, model.decoder
  shape = [num_rows, length]
  inputs = tf.placeholder(tf.int32, shape, "inputs")
  targets = tf.placeholder(tf.int32, shape, "targets")
  y, _ = decoder.prefill(split_rows(impl, inputs), length)
  token_loss = decoder.token_loss(
    impl.slicewise(lambda y: tf.reshape(y, [-1, y.shape[-1]]), y),
    impl.slicewise(lambda x: tf.reshape(x, [-1]), split_rows(impl, targets)),
  )
  token_loss = impl.slicewise(lambda x: tf.reshape(x, [-1, length]), token_loss)
  return ScoreProgram(inputs, targets, join_rows(impl, token_loss))
