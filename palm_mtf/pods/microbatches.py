# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums over the microbatches of one step, kept in float32 beside the weights.

A step of several microbatches runs the forward and backward pass once for each,
adding what comes out to accumulators, and then the update once on the sums. So
memory holds the activations of one microbatch, however many there are. The
client runs the passes one after the other: a while loop in the program would
hold the batch of the whole step on the devices, and the exchange between pods,
once a step, needs a place between the passes and the update.

A sum over a split dimension is left open: each slice adds up its own part, and
the parts are all-reduced when the sum is read, once a step.
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.model.loss import (
  divisor,
  weight_sum,
  weighted_mean,
  weighted_sum,
)
from palm_mtf.variables import Fill, sliced_variable


class Accumulate(mtf.Operation):
  """Adds its input to an accumulator; outputs the sum as it was before.

  The operation, not its output, does the addition. So a program that reads the
  output must be run after those that add.

  Attributes:
    sum_name: of the accumulator.
  """

  def __init__(self, name: str, value: mtf.Tensor, is_first: tf.Tensor):
    """Makes the accumulator `name`, which no checkpoint holds.

    Args:
      name: of the accumulator, unlike that of any variable.
      value: what is added, any float dtype.
      is_first: [], bool; where it is true the sum begins anew with `value`.
    """
    self.sum_name = name
    self._sum = sliced_variable(
      value.mesh, name, value.shape, initializer=Fill(0.0), trainable=False
    ).operation
    super().__init__([value], name=f"{name}/add")
    self._is_first = is_first
    self._outputs = [mtf.Tensor(self, value.shape, tf.float32)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one addition in place a slice, and the sum's all-reduce."""
    mesh_impl = lowering.mesh_impl(self)
    value = lowering.tensors[self.inputs[0]]
    is_open = isinstance(value, mtf.LazyAllreduceSum)
    part = value.laid_out_input if is_open else value.to_laid_out_tensor()
    slots = lowering.variables[self._sum].laid_out_tensor
    added = mesh_impl.slicewise(self._add, slots, part)
    lowering.operations[self] = tf.group(added.all_slices)
    total = mesh_impl.slicewise(tf.convert_to_tensor, slots)
    if is_open:  # all-reduce, over the axes that the value is a sum over
      total = mtf.LazyAllreduceSum(mesh_impl, total, value.mesh_axes)
    lowering.set_tensor_lowering(self.outputs[0], total)

  def _add(self, slot, value):
    value = tf.cast(value, tf.float32)
    # Not slot * 0: the accumulator may hold nothing yet, or what is no number.
    return tf.cond(
      self._is_first,
      lambda: slot.assign(value).op,
      lambda: slot.assign_add(value).op,
    )


@dataclasses.dataclass(frozen=True)
class TokenLosses:
  """What a forward pass says of each token, [batch, length] float32 each.

  Attributes:
    nats: -log p(target).
    log_z: of the logits.
    loss_weights: of each token in the means; None is 1 each.
  """

  nats: mtf.Tensor
  log_z: mtf.Tensor
  loss_weights: mtf.Tensor | None


@dataclasses.dataclass(frozen=True)
class StepGradients:
  """What the update of a step starts from.

  Attributes:
    loss: [], float32: nats a token of the step.
    z_loss: [], float32: the weighted mean of log_z ** 2, times Z_LOSS.
    gradients: of each variable, of loss + z_loss times `multiple`.
    multiple: [], float32, or None for 1. Dividing by it is left to the scalar
      that the optimizer multiplies gradients by, for they are large.
    accumulations: to run on each microbatch before the rest is read.
  """

  loss: mtf.Tensor
  z_loss: mtf.Tensor
  gradients: list[mtf.Tensor]
  multiple: mtf.Tensor | None
  accumulations: list[Accumulate]


def step_gradients(
  tokens: TokenLosses,
  z_loss: float,
  variables: Sequence[mtf.Variable],
  *,
  num_microbatches: int,
  is_first: tf.Tensor,
) -> StepGradients:
  """Returns the gradients of a step of one microbatch or several.

  Args:
    tokens: of one microbatch.
    z_loss: Z_LOSS.
    variables: the trained ones.
    num_microbatches: in the step.
    is_first: [], bool: whether this microbatch is the first of its step.
  """
  if num_microbatches > 1:
    return _summed_gradients(tokens, z_loss, variables, is_first)
  loss = weighted_mean(tokens.nats, tokens.loss_weights)
  z_loss *= weighted_mean(mtf.square(tokens.log_z), tokens.loss_weights)
  gradients = mtf.gradients([loss + z_loss], [v.value for v in variables])
  return StepGradients(loss, z_loss, gradients, None, [])


def _summed_gradients(
  tokens: TokenLosses,
  z_loss: float,
  variables: Sequence[mtf.Variable],
  is_first: tf.Tensor,
) -> StepGradients:
  """Returns the gradients of a step, summed over its microbatches.

  What is summed are numerators and weights: a mean over the tokens of a step
  is not the mean of its microbatches' means where their weights differ.
  """
  nats = weighted_sum(tokens.nats, tokens.loss_weights)
  squares = weighted_sum(mtf.square(tokens.log_z), tokens.loss_weights)
  values = {
    "nats_sum": nats,
    "log_z_square_sum": squares,
    "weight_sum": weight_sum(tokens.nats, tokens.loss_weights),
  }
  gradients = mtf.gradients(
    [nats + z_loss * squares], [v.value for v in variables]
  )
  for variable, gradient in zip(variables, gradients, strict=True):
    values[f"{variable.name}/gradient_sum"] = gradient
  accumulations = [
    Accumulate(name, value, is_first) for name, value in values.items()
  ]
  nats, squares, weight, *gradients = (x.outputs[0] for x in accumulations)
  weight = divisor(weight)
  return StepGradients(
    nats / weight, z_loss * squares / weight, gradients, weight, accumulations
  )
