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
  token = local_rows(first, ids, logits.shape[-1])
  each = tf.exp(log_p) if targets == "top" else 1 / ids.shape[-1]
  each *= tf.cast(token >= 0, tf.float32)  # tokens of other slices add 0
  row, position, _ = tf.meshgrid(*map(tf.range, ids.shape), indexing="ij")
  places = tf.stack([row, position, tf.maximum(token, 0)], -1)
  weights = tf.scatter_nd(places, each, logits.shape)
  return weights, log_q, tf.reduce_sum(each * log_p, -1)


@fused
def _sums(form, *inputs):
  # Returns the slice's terms of two sums: of weights times log(p / q), and of q
  # of all tokens without a weight, [batch, length] each.
  weights, log_q, of_teacher = _find_weights(form, *inputs)
  # Logits that pad the vocabulary may be -inf, so never multiply them by 0.
  of_model = tf.where_v2(weights > 0, weights * log_q, 0.0)
  others = tf.where_v2(weights > 0, 0.0, tf.exp(log_q))
  return of_teacher - tf.reduce_sum(of_model, -1), tf.reduce_sum(others, -1)


def _find_others(log_p, others):
  # Returns the probabilities of "any other token" in teacher and model, of
  # which logarithms are taken.
  of_teacher = 1.0 - tf.reduce_sum(tf.exp(log_p), -1)
  return tf.maximum(of_teacher, _SMALLEST), tf.maximum(others, _SMALLEST)


@fused
def _add_others(total, others, log_p):
  of_teacher, of_model = _find_others(log_p, others)
  return total + of_teacher * tf.math.log(of_teacher / of_model)


@fused
def _gradient(form, dtype, first, dy, others, *inputs):
  # Returns the gradient of the logits, also by way of log_z.
  targets, temperature = form
  weights, log_q, _ = _find_weights(form, first, *inputs)
  q = tf.exp(log_q)
  dx = q - weights
  if targets == "top":
    of_teacher, of_model = _find_others(inputs[2], others)
    share = (of_teacher / of_model)[..., tf.newaxis]
    dx -= tf.where_v2(weights > 0, 0.0, q * share)
  return tf.cast(dx * dy[..., tf.newaxis] / temperature, dtype)


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
  log_p, output = batch["teacher_log_p"], (log_z.shape, tf.float32)
  inputs = [logits, log_z, log_p]
  missing = [None]
  if "teacher_ids" in batch:
    inputs, missing = [*inputs, batch["teacher_ids"]], []
  options = {
    "splittable": ["batch", "vocab"],
    "offset_of": logits.shape.dims[-1],
  }

  def gradient(op: mtf.Operation, dy: mtf.Tensor, unused_others: None) -> list:
    dlogits = WholeSlice(
      lambda *x: _gradient(form, dtype, *x, *missing),
      [dy, op.outputs[1], *inputs],
      [(logits.shape, dtype)],
      **options,
      name="teacher_gradient",
    ).outputs[0]
    return [dlogits, *[None] * (len(inputs) - 1)]

  known, others = WholeSlice(
    lambda *x: _sums(form, *x, *missing),
    inputs,
    [output, output],
    gradient=gradient,
    **options,
    name="teacher_sums",
  ).outputs
  if form[0] != "top":
    return known
  # The gradient of the operation above includes that of `others`.
  return WholeSlice(
    _add_others,
    [known, others, log_p],
    [output],
    splittable=["batch"],
    gradient=lambda op, dy: [dy, None, None],
    name="add_others",
  ).outputs[0]


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
