# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Graph that scores rows: -log p of each token."""

from palm_mtf._tf import mtf, tf
from palm_mtf.generation.decode.forward import build_palm, make_prefix_masks
from palm_mtf.generation.decode.weights import DecodeModel
from palm_mtf.mesh.placement import lower
from palm_mtf.model.loss import cross_entropy
from palm_mtf.runtime.program import Program

NUM_LIKELIEST = 5  # number of likeliest tokens to return per position


def build_score_program(
  model: DecodeModel, num_rows: int, length: int
) -> Program:
  """Builds the program that scores rows of one length, in the current tf.Graph.

  `forward.build_palm` documents the arguments.

  Inputs:
    inputs: [rows, length], int32: the token before each target.
    targets: [rows, length], int32: tokens to score.
    num_given: [rows], int32: the first `num_given` inputs attend to one another
      in both directions. Ignored if OBJECTIVE is "causal".

  Outputs:
    token_loss: [rows, length], float32: -log p of each target.
    is_likeliest: [rows, length], bool: whether no token is likelier than the
      target.
    likeliest: [rows, length, k], int32: the k likeliest tokens that could stand
      in place of each target, likeliest first.
    likeliest_loss: [rows, length, k], float32: -log p of `likeliest`.
  """
  inputs, targets = (
    tf.placeholder(tf.int32, [num_rows, length], name)
    for name in ("inputs", "targets")
  )
  num_given = tf.placeholder(tf.int32, [num_rows], "num_given")
  # Scoring uses decoding's weights, so that a process that scores and continues
  # texts holds only one copy of the weights.
  mesh, shape, palm = build_palm(model, num_rows, length)
  masks = [None, None]
  if model.config.has_prefix:
    prefix = tf.sequence_mask(num_given, length, tf.int32)
    masks = make_prefix_masks(mtf.import_tf_tensor(mesh, prefix, shape))
  logits = palm.logits(mtf.import_tf_tensor(mesh, inputs, shape), *masks)
  wanted = mtf.import_tf_tensor(mesh, targets, shape)
  token_loss, log_z = cross_entropy(logits, wanted)
  # Summing `logits * is_target` over the vocabulary gives the target's logit.
  vocab = logits.shape.dims[-1]
  is_target = mtf.one_hot(wanted, vocab, dtype=logits.dtype)
  is_likeliest = mtf.greater_equal(
    mtf.reduce_sum(logits * is_target, reduced_dim=vocab),
    mtf.reduce_max(logits, reduced_dim=vocab),
  )
  exported = {
    "token_loss": token_loss,
    "is_likeliest": is_likeliest,
    "log_z": log_z,
    "logits": logits,
  }
  lowered = lower({mesh: model.placement}, exported).tensors
  vocab_size = model.config.vocab_size  # without its padding
  top, likeliest = tf.math.top_k(
    tf.cast(lowered["logits"][..., :vocab_size], tf.float32),
    min(NUM_LIKELIEST, vocab_size),
  )
  return Program(
    {"inputs": inputs, "targets": targets, "num_given": num_given},
    {
      "token_loss": lowered["token_loss"],
      "is_likeliest": lowered["is_likeliest"],
      "likeliest": likeliest,
      "likeliest_loss": lowered["log_z"][..., tf.newaxis] - top,
    },
  )
