# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of every token, and the z-loss that keeps log(Z) near zero.

Z          = sum over vocab of exp(logits)
token_loss = log(Z) - logits[target], in nats
loss       = mean(token_loss)
z_loss     = Z_LOSS * mean(log(Z) ** 2)               (PaLM, section 5)
"""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.model.layers import local_rows
from palm_mtf.native import layers as native
from palm_mtf.ops.slicewise import (
  WholeSlice,
  native_threads,
  slice_offset,
  split_axes,
)
from palm_mtf.ops.xla import fused

# Least divisor of a weighted mean, which is 0 and not NaN if all weights are 0.
SMALLEST_WEIGHT = 1e-30


@fused
def _fused_sums(row, logits):
  logits, row = tf.cast(logits, tf.float32), row[:, tf.newaxis]
  largest = tf.reduce_max(logits, -1)
  normalizer = tf.reduce_sum(tf.exp(logits - largest[:, tf.newaxis]), -1)
  target = tf.gather(logits, tf.maximum(row, 0), batch_dims=1)
  return largest, normalizer, tf.where_v2(row >= 0, target, 0.0)[:, 0]


def _slice_sums(first, logits, targets, threads):
  # Returns, for the slice of `vocab` from token `first`, [batch, length]
  # float32 each: the largest logit; sum(exp(logits - largest)); and the
  # target's logit, or 0 if another slice holds the target.
  row = tf.reshape(local_rows(first, targets, logits.shape[-1]), [-1])
  rows = tf.reshape(logits, [row.shape[0], -1])
  # Use C++ if possible: XLA would write exp(logits) to memory, in float32.
  if threads:
    sums = native.sum_logits(rows, row, threads=threads)
  else:
    sums = _fused_sums(row, rows)
  return tuple(tf.reshape(x, targets.shape) for x in sums)


@fused
def _rescale(normalizer, largest, largest_of_all):
  return normalizer * tf.exp(largest - largest_of_all)


@fused
def _token_loss_and_log_z(largest, normalizer, target):
  log_z = largest + tf.math.log(normalizer)
  return log_z - target, log_z


@fused
def _cross_entropy_gradient(
  first, logits, targets, log_z, dloss, dlog_z, dtype
):
  # dlogits = softmax * (dloss + dlog_z) - onehot(target) * dloss
  row = tf.range(logits.shape[-1]) + first
  is_target = tf.equal(row, targets[..., tf.newaxis])
  log_z, dloss, dlog_z = (x[..., tf.newaxis] for x in (log_z, dloss, dlog_z))
  dx = tf.exp(tf.cast(logits, tf.float32) - log_z) * (dloss + dlog_z)
  return tf.cast(tf.where_v2(is_target, dx - dloss, dx), dtype)


class CrossEntropy(mtf.Operation):
  """Outputs -log p(target) and log(Z), [batch, length] float32 each."""

  def __init__(
    self, logits: mtf.Tensor, targets: mtf.Tensor, gradient_dtype: tf.DType
  ):
    super().__init__([logits, targets], name="cross_entropy")
    self._gradient_dtype = gradient_dtype
    self._outputs = [
      mtf.Tensor(self, targets.shape, tf.float32) for _ in range(2)
    ]

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> list:
    """Returns the gradient of the logits; the targets have none."""
    logits, targets = self.inputs
    dloss, dlog_z = (
      mtf.zeros_like(y) if dy is None else dy
      for y, dy in zip(self.outputs, grad_ys, strict=True)
    )
    dtype = self._gradient_dtype
    dlogits = WholeSlice(
      lambda *inputs: _cross_entropy_gradient(*inputs, dtype),
      [logits, targets, self.outputs[1], dloss, dlog_z],
      [(logits.shape, dtype)],
      splittable=["batch", "vocab"],
      offset_of=logits.shape.dims[-1],
      name="cross_entropy_gradient",
    ).outputs[0]
    return [dlogits, None]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to at most three all-reduces, each of one number per token."""
    mesh_impl = lowering.mesh_impl(self)
    vocab = self.inputs[0].shape.dims[-1]
    axes = split_axes(mesh_impl, [vocab])
    logits, targets = (lowering.tensors[x] for x in self.inputs)
    largest, normalizer, target = mesh_impl.slicewise(
      _slice_sums,
      slice_offset(mesh_impl, vocab),
      *(logits, targets, native_threads(mesh_impl)),
    )
    if axes:
      # All-reduce the maximum over `vocab`, so that exp(logits - largest) <= 1.
      of_all = mesh_impl.allreduce(largest, axes, "MAX")
      normalizer = mesh_impl.slicewise(_rescale, normalizer, largest, of_all)
      # All-reduce two numbers per token; logits never leave their device.
      normalizer, target = (
        mesh_impl.allreduce(x, axes, "SUM") for x in (normalizer, target)
      )
      largest = of_all
    sums = (largest, normalizer, target)
    values = mesh_impl.slicewise(_token_loss_and_log_z, *sums)
    for output, value in zip(self.outputs, values, strict=True):
      lowering.set_tensor_lowering(output, value)


def cross_entropy(
  logits: mtf.Tensor,
  targets: mtf.Tensor,
  gradient_dtype: tf.DType | None = None,
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Returns -log p(target) and log(sum(exp(logits))), [batch, length] float32.

  Args:
    logits: [batch, length, vocab], any float dtype.
    targets: [batch, length], int32 in [0, vocab).
    gradient_dtype: dtype of the logits' gradient; None is the logits' dtype.
  """
  gradient_dtype = gradient_dtype or logits.dtype
  token_loss, log_z = CrossEntropy(logits, targets, gradient_dtype).outputs
  return token_loss, log_z


# Loss weights are [batch, length], float32, at least 0: 1 for tokens to learn,
# 0 for padding and for the inputs of a prefix LM. None means that all are 1.


def weight_sum(
  targets: mtf.Tensor, loss_weights: mtf.Tensor | None
) -> mtf.Tensor:
  """Returns the sum of the loss weights of all targets, [] float32."""
  if loss_weights is None:
    return mtf.constant(targets.mesh, targets.shape.size, dtype=tf.float32)
  return mtf.reduce_sum(loss_weights)


def weighted_mean(x: mtf.Tensor, loss_weights: mtf.Tensor | None) -> mtf.Tensor:
  """Returns sum(x * loss_weights) / sum(loss_weights), [] float32."""
  # Both sums are over all slices, which count in proportion to their weights.
  total = weighted_sum(x, loss_weights)
  return total / divisor(weight_sum(x, loss_weights))


def weighted_sum(x: mtf.Tensor, loss_weights: mtf.Tensor | None) -> mtf.Tensor:
  """Returns sum(x * loss_weights), [] float32."""
  return mtf.reduce_sum(x if loss_weights is None else x * loss_weights)


def divisor(total_weight: mtf.Tensor) -> mtf.Tensor:
  """Returns the divisor of a weighted mean, [] float32, which is never 0."""
  return mtf.maximum(total_weight, SMALLEST_WEIGHT)
