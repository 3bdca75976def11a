# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Cross-entropy of every token, and the z-loss that keeps log(Z) near zero.

  Z          = sum over vocab of exp(logits)
  token_loss = log(Z) - logits[target], in nats
  loss       = mean(token_loss)
  z_loss     = Z_LOSS * mean(log(Z) ** 2)                         (PaLM 5)

Both means are over all tokens of the batch. Where tokens have loss weights, 1
for what is learnt and 0 for padding or a given input, they are weighted means.

The logits are read twice on the way forward and once on the way back, in
float32 arithmetic; the only other tensor of their size is their gradient:

  dlogits = softmax * (dloss + dlog_z) - onehot(target) * dloss
"""

from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.ops.slicewise import WholeSlice, slice_offset, split_axes
from palm_mtf.ops.xla import fused

LaidOut = mtf.placement_mesh_impl.PlacementMeshImpl.LaidOutTensor

# What no sum of weights is below, unless all of them are 0.
_SMALLEST_WEIGHT = 1e-30


def _is_target(first, logits, targets):
  """Marks the target of each token, if this slice of `vocab` holds it."""
  row = tf.range(logits.shape[-1]) + first
  return tf.equal(row, targets[..., tf.newaxis])


@fused
def _largest(logits):
  return tf.cast(tf.reduce_max(logits, -1), tf.float32)


@fused
def _slice_sums(first, logits, targets, largest):
  """Returns the slice's sum of exp(logits - largest), and its target logit."""
  is_target = _is_target(first, logits, targets)
  logits = tf.cast(logits, tf.float32)
  normalizer = tf.reduce_sum(tf.exp(logits - largest[..., tf.newaxis]), -1)
  target = tf.reduce_sum(tf.where_v2(is_target, logits, 0.0), -1)
  return normalizer, target


@fused
def _token_loss_and_log_z(largest, normalizer, target):
  log_z = largest + tf.math.log(normalizer)
  return log_z - target, log_z


@fused
def _cross_entropy_gradient(first, logits, targets, log_z, dloss, dlog_z):
  is_target = _is_target(first, logits, targets)
  x, log_z, dloss, dlog_z = (
    tf.cast(logits, tf.float32),
    log_z[..., tf.newaxis],
    dloss[..., tf.newaxis],
    dlog_z[..., tf.newaxis],
  )
  dx = tf.exp(x - log_z) * (dloss + dlog_z)
  return tf.cast(tf.where_v2(is_target, dx - dloss, dx), logits.dtype)


class CrossEntropy(mtf.Operation):
  """Outputs token_loss and log_z, [batch, length] float32, of logits."""

  def __init__(self, logits: mtf.Tensor, targets: mtf.Tensor):
    super().__init__([logits, targets], name="cross_entropy")
    self._outputs = [
      mtf.Tensor(self, targets.shape, tf.float32) for _ in range(2)
    ]

  @property
  def has_gradient(self) -> bool:
    """Whether a loss can be traced through it."""
    return True

  def gradient(self, grad_ys: Sequence[mtf.Tensor | None]) -> list:
    """Returns the gradient of the logits; the targets have none."""
    logits, targets = self.inputs
    dloss, dlog_z = (
      mtf.zeros_like(y) if dy is None else dy
      for y, dy in zip(self.outputs, grad_ys, strict=True)
    )
    dlogits = WholeSlice(
      _cross_entropy_gradient,
      [logits, targets, self.outputs[1], dloss, dlog_z],
      [(logits.shape, logits.dtype)],
      splittable=["batch", "vocab"],
      offset_of=logits.shape.dims[-1],
      name="cross_entropy_gradient",
    ).outputs[0]
    return [dlogits, None]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to at most three collectives, of one number a token each."""
    logits, targets = self.inputs
    values = laid_out_cross_entropy(
      lowering.mesh_impl(self),
      logits.shape.dims[-1],
      lowering.tensors[logits],
      lowering.tensors[targets],
    )
    for output, value in zip(self.outputs, values, strict=True):
      lowering.set_tensor_lowering(output, value)


def laid_out_cross_entropy(
  mesh_impl: mtf.MeshImpl,
  vocab: mtf.Dimension,
  logits: LaidOut,
  targets: LaidOut,
) -> list[LaidOut]:
  """Returns token_loss and log_z of every token, float32, on every device.

  Args:
    mesh_impl: devices and layout.
    vocab: the last dimension of `logits`, which may be split.
    logits: [..., vocab], activation dtype.
    targets: [...], int32.
  """
  axes = split_axes(mesh_impl, [vocab])
  largest = mesh_impl.slicewise(_largest, logits)
  # all-reduce: the largest logit of all slices of `vocab`
  largest = mesh_impl.allreduce(largest, axes, "MAX")
  sums = mesh_impl.slicewise(
    _slice_sums, slice_offset(mesh_impl, vocab), logits, targets, largest
  )
  # all-reduce: two numbers a token, never the logits
  sums = [mesh_impl.allreduce(x, axes, "SUM") for x in sums]
  return mesh_impl.slicewise(_token_loss_and_log_z, largest, *sums)


def cross_entropy(
  logits: mtf.Tensor, targets: mtf.Tensor
) -> tuple[mtf.Tensor, mtf.Tensor]:
  """Returns -log p(target) and log(Z) of every token.

  Args:
    logits: [batch, length, vocab], activation dtype.
    targets: [batch, length], int32 in [0, vocab).

  Returns:
    token_loss: [batch, length], float32.
    log_z: [batch, length], float32.
  """
  token_loss, log_z = CrossEntropy(logits, targets).outputs
  return token_loss, log_z


def weight_sum(
  targets: mtf.Tensor, loss_weights: mtf.Tensor | None
) -> mtf.Tensor:
  """Returns how many tokens the loss is the mean of, [] float32.

  Args:
    targets: [batch, length].
    loss_weights: [batch, length], float32, none below 0; None is 1 each.
  """
  if loss_weights is None:
    return mtf.constant(targets.mesh, targets.shape.size, dtype=tf.float32)
  return mtf.reduce_sum(loss_weights)


def weighted_mean(x: mtf.Tensor, loss_weights: mtf.Tensor | None) -> mtf.Tensor:
  """Returns sum(x * loss_weights) / sum(loss_weights), [] float32.

  Both sums are over the whole batch, also where it is split. Where no token has
  a weight the mean and its gradients are 0, not 0 / 0.

  Args:
    x: [batch, length], float32.
    loss_weights: weight of each token, none below 0, in its shape; None is 1
    each.
  """
  if loss_weights is None:
    return mtf.reduce_mean(x)
  return mtf.reduce_sum(x * loss_weights) / divisor(weight_sum(x, loss_weights))


def weighted_sum(x: mtf.Tensor, loss_weights: mtf.Tensor | None) -> mtf.Tensor:
  """Returns sum(x * loss_weights), [] float32; see `weighted_mean`."""
  return mtf.reduce_sum(x if loss_weights is None else x * loss_weights)


def divisor(total_weight: mtf.Tensor) -> mtf.Tensor:
  """Returns what a sum is divided by to be a mean: never 0, [] float32."""
  return mtf.maximum(total_weight, _SMALLEST_WEIGHT)
