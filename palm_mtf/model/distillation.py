# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss that compares a model with its teacher (distillation).

With p = softmax(teacher's logits / T), q = softmax(model's logits / T) and T =
TEACHER_TEMPERATURE, the divergence D of a position is, for TEACHER_TARGETS =

  "full"     KL(p || q), the sum over all tokens of p * log(p / q)
  "top"      KL(p || q) of TEACHER_TOKENS + 1 outcomes: the teacher's likeliest
             tokens, and any other token
  "sampled"  the mean of log(p / q) over TEACHER_TOKENS tokens drawn from p

  gradient = (1 - TEACHER_WEIGHT) * gradient of the cross-entropy
             + TEACHER_WEIGHT * T ** 2 * gradient of D

The mean of "sampled" over all draws is "full", and so are the means of their
gradients (Anshumann et al. 2025). Without the outcome "any other token", "top"
would teach that other tokens are impossible. T ** 2 keeps the share of D in the
gradient about the same for every T (Hinton et al. 2015, section 2).
"""

from collections.abc import Mapping

from palm_mtf._tf import mtf, tf
from palm_mtf.config import LossConfig
from palm_mtf.model.layers import local_rows
from palm_mtf.model.loss import cross_entropy
from palm_mtf.ops.slicewise import WholeSlice
from palm_mtf.ops.xla import fused

_SMALLEST = 1e-30  # least probability whose logarithm is taken


def _find_weights(form, first, logits, log_z, log_p, ids):
  # Returns, for the slice of `vocab` from token `first`: weights of log(p / q),
  # [batch, length, vocab]; log q, of the same shape; and the sum of the weights
  # times log p, [batch, length]. `form` is (TEACHER_TARGETS, T).
  targets, temperature = form
  logits = tf.cast(logits, tf.float32) / temperature
  log_q = logits - log_z[..., tf.newaxis]
  if targets == "full":
    weights = tf.exp(log_p)
    return weights, log_q, tf.reduce_sum(weights * log_p, -1)
  places = tf.reshape(
    local_rows(first, ids, logits.shape[-1]), [-1, ids.shape[-1]]
  )
  is_here = tf.cast(places >= 0, tf.float32)  # tokens of other slices add 0
  each = is_here / ids.shape[-1]
  if targets == "top":
    each = is_here * tf.exp(tf.reshape(log_p, places.shape))
  numbers = tf.range(places.shape[0])[:, tf.newaxis] + tf.zeros_like(places)
  weights = tf.scatter_nd(
    tf.stack([numbers, tf.maximum(places, 0)], -1),
    each,
    [places.shape[0], logits.shape[-1]],
  )
  of_teacher = tf.reduce_sum(tf.reshape(each, log_p.shape) * log_p, -1)
  return tf.reshape(weights, logits.shape), log_q, of_teacher


@fused
def _sums(form, *inputs):
  # Returns the slice's terms of two sums: of weights times log(p / q), and of q
  # of all tokens without a weight, [batch, length] each.
  weights, log_q, of_teacher = _find_weights(form, *inputs)
  # Logits that pad the vocabulary may be -inf, so never multiply them by 0.
  of_model = tf.where_v2(weights > 0, weights * log_q, 0.0)
  others = tf.where_v2(weights > 0, 0.0, tf.exp(log_q))
  return of_teacher - tf.reduce_sum(of_model, -1), tf.reduce_sum(others, -1)


@fused
def _gradient(form, dtype, first, others, dsum, dothers, *inputs):
  # Returns the gradient of the logits, also by way of log_z.
  targets, temperature = form
  weights, log_q, _ = _find_weights(form, first, *inputs)
  others, dsum, dothers = (x[..., tf.newaxis] for x in (others, dsum, dothers))
  q, total, is_other = tf.exp(log_q), 1.0, tf.cast(weights <= 0, tf.float32)
  if targets == "top":
    total = tf.reduce_sum(tf.exp(inputs[2]), -1, keepdims=True)
  dx = dsum * (q * total - weights) + dothers * q * (is_other - others)
  return tf.cast(dx / temperature, dtype)


def _add_others(total, of_teacher, of_model):
  # Adds the outcome "any other token": its probability in teacher and model.
  log_p, log_q = (
    tf.math.log(tf.maximum(x, _SMALLEST)) for x in (of_teacher, of_model)
  )
  return total + of_teacher * (log_p - log_q)


def _find_divergence(
  logits: mtf.Tensor,
  log_z: mtf.Tensor,
  batch: Mapping[str, mtf.Tensor],
  form: tuple[str, float],
  dtype: tf.DType,
) -> mtf.Tensor:
  """Returns D, [batch, length] float32; see `teacher_terms`.

  `dtype` is the dtype of the gradient of `logits`, which includes the gradient
  by way of `log_z`, the logarithm of the sum of exp(logits / T).
  """
  vocab, log_p = logits.shape.dims[-1], batch["teacher_log_p"]
  ids = [batch["teacher_ids"]] if "teacher_ids" in batch else []
  missing = [None] * (1 - len(ids))
  options = {"splittable": ["batch", "vocab"], "offset_of": vocab}

  def gradient(op: mtf.Operation, *dys: mtf.Tensor | None) -> list:
    dys = [mtf.zeros_like(log_z) if dy is None else dy for dy in dys]
    dlogits = WholeSlice(
      lambda *x: _gradient(form, dtype, *x, *missing),
      [op.outputs[1], *dys, *op.inputs],
      [(logits.shape, dtype)],
      **options,
      name="teacher_gradient",
    ).outputs[0]
    return [dlogits, *[None] * (len(op.inputs) - 1)]

  known, others = WholeSlice(
    lambda *x: _sums(form, *x, *missing),
    [logits, log_z, log_p, *ids],
    [(log_z.shape, tf.float32)] * 2,
    gradient=gradient,
    **options,
    name="teacher_sums",
  ).outputs
  if form[0] != "top":
    return known
  kept = mtf.reduce_sum(mtf.exp(log_p), output_shape=log_z.shape)
  of_teacher = mtf.relu(1.0 - kept)
  return mtf.cwise(
    _add_others,
    [known, of_teacher, others],
    grad_function=lambda op, dy: [
      *(dy, None, -dy * of_teacher / mtf.maximum(others, _SMALLEST))
    ],
  )


def _weigh_gradient(x: mtf.Tensor, factor: float) -> mtf.Tensor:
  weigh = lambda op, dy: [dy * factor]  # noqa: E731
  return mtf.cwise(tf.identity, [x], grad_function=weigh)


def teacher_terms(
  logits: mtf.Tensor,
  token_loss: mtf.Tensor,
  log_z: mtf.Tensor,
  batch: Mapping[str, mtf.Tensor],
  loss: LossConfig,
  gradient_dtype: tf.DType,
) -> dict[str, mtf.Tensor]:
  """Returns the cross-entropy "loss" and D, "teacher_loss", of each position.

  Only their gradients are weighted, so that a loss means the same with and
  without a teacher. Results are [batch, length] float32.

  Args:
    logits: [batch, length, vocab], any float dtype.
    token_loss, log_z: what `cross_entropy` returns for `logits`.
    batch: "targets", and what `teacher_features` of `loss` names.
    loss: TEACHER_TARGETS, TEACHER_TEMPERATURE and TEACHER_WEIGHT.
    gradient_dtype: dtype of the gradient of `logits`.
  """
  temperature, weight = loss.teacher_temperature, loss.teacher_weight
  if temperature != 1:
    scaled = mtf.cast(logits, tf.float32) * (1 / temperature)
    _, log_z = cross_entropy(scaled, batch["targets"])
  form = loss.teacher_targets, temperature
  divergence = _find_divergence(logits, log_z, batch, form, gradient_dtype)
  return {
    "loss": _weigh_gradient(token_loss, 1 - weight),
    "teacher_loss": _weigh_gradient(divergence, weight * temperature**2),
  }
