# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of pairs of answers: direct preference optimization (DPO).

  log ratio = log p(chosen answer) - log p(rejected answer)
  margin    = PREFERENCE_BETA * (log ratio - log ratio of the reference)
  loss      = -log(sigmoid(margin))

The reference is the model before training. Source: Rafailov et al. 2023,
equation 7. With margin 0, as before training, the loss is log(2).
"""

from palm_mtf._tf import mtf, tf


def preference_terms(
  token_loss: mtf.Tensor,
  loss_weights: mtf.Tensor,
  reference: mtf.Tensor,
  beta: float,
) -> dict[str, mtf.Tensor]:
  """Returns the loss of each row, and metrics without gradients.

  Args:
    token_loss: -log p of each target, [batch, length], float32.
    loss_weights: 1 at targets of the chosen answer, -1 at those of the rejected
      answer, and otherwise 0, [batch, length], float32.
    reference: log ratio of the reference, [batch], float32.
    beta: PREFERENCE_BETA.

  Returns:
    By name, [batch] float32 each: "loss"; the margin; and whether the margin is
    above 0. Metrics have the names of TRL.
  """
  batch, _ = token_loss.shape.dims
  log_ratio = -mtf.reduce_sum(
    token_loss * loss_weights, output_shape=mtf.Shape([batch])
  )
  margin = beta * (log_ratio - reference)
  loss = mtf.cwise(
    lambda x: tf.math.softplus(-x),
    [margin],
    name="preference_loss",
    grad_function=lambda op, dy: [-dy * mtf.sigmoid(-op.inputs[0])],
  )
  is_right = mtf.cast(mtf.greater(margin, 0.0), tf.float32)
  return {
    "loss": loss,
    "rewards/margins": mtf.stop_gradient(margin),
    "rewards/accuracies": mtf.stop_gradient(is_right),
  }
