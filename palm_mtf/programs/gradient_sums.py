# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Sums of losses and gradients: over a microbatch, a step, and all pods.

All microbatches of a step but the last add their sums to float32 accumulators.
The last microbatch's pass runs together with exchange and update, on the sums
so far plus its own. So memory holds the activations of one microbatch, however
many there are, and a gradient is on its way to other pods while earlier layers
still compute theirs. The client runs the passes of a pod one after the other: a
while loop in the program would hold the batch of the whole step on the devices.
"""

import dataclasses
from collections.abc import Sequence

from palm_mtf._tf import mtf, tf
from palm_mtf.errors import UserError
from palm_mtf.mesh.exchange import Exchange, OwnPart
from palm_mtf.ops.variables import Fill, sliced_variable
from palm_mtf.ops.xla import fused
from palm_mtf.programs.loss_function import LossSums


@dataclasses.dataclass(frozen=True)
class Sums:
  """Sums over rows, on the mesh of one pod, float32.

  Attributes:
    losses: sums of the losses.
    gradients: sums of the gradients of `losses.total`, by variable in order.
  """

  losses: LossSums
  gradients: Sequence[mtf.Tensor]


def sum_microbatch(losses: LossSums, variables: Sequence[mtf.Variable]) -> Sums:
  """Returns the sums of one microbatch.

  Args:
    losses: losses of the microbatch.
    variables: trained variables.

  Raises:
    UserError: the loss does not depend on a variable.
  """
  gradients = mtf.gradients([losses.total], [v.value for v in variables])
  for variable, gradient in zip(variables, gradients, strict=True):
    if gradient is None:
      raise UserError(
        f"the loss does not depend on the variable {variable.name}: leave it "
        "out of the model, or make it with trainable=False."
      )
  return Sums(losses, gradients)


@fused
def _plus(total, value):
  return total + tf.cast(value, tf.float32)


class Accumulate(mtf.Operation):
  """Adds its input to an accumulator: all microbatches but the last do.

  Attributes:
    sum_name: name of the accumulator.
    accumulator: variable that it adds to.
  """

  def __init__(self, name: str, value: mtf.Tensor, is_first: tf.Tensor):
    """Makes the accumulator `name`, which no checkpoint holds.

    Args:
      name: name of the accumulator, unlike that of any variable.
      value: next term of the sum, any float dtype.
      is_first: [], bool; where it is true the sum starts again with `value`.
    """
    self.sum_name = name
    self.accumulator = sliced_variable(
      value.mesh, name, value.shape, initializer=Fill(0.0), trainable=False
    ).operation
    super().__init__([value], name=f"{name}/add")
    self._is_first = is_first

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one addition in place per slice."""
    slots, part, _ = _lay_out(lowering, self.accumulator, self.inputs[0])
    added = lowering.mesh_impl(self).add(slots, part, self._is_first)
    lowering.operations[self] = tf.group(added)


class AccumulatedSum(mtf.Operation):
  """Outputs an accumulator plus the last microbatch's value, not kept."""

  def __init__(self, accumulate: Accumulate):
    """Adds the input of `accumulate` to its sum."""
    super().__init__(accumulate.inputs, name=f"{accumulate.sum_name}/read")
    self._accumulator = accumulate.accumulator
    (value,) = accumulate.inputs
    self._outputs = [mtf.Tensor(self, value.shape, tf.float32)]

  def lower(self, lowering: mtf.Lowering) -> None:
    """Lowers to one addition per slice, and the all-reduce that is pending."""
    mesh_impl = lowering.mesh_impl(self)
    slots, part, open_axes = _lay_out(
      lowering, self._accumulator, self.inputs[0]
    )
    so_far = mesh_impl.slicewise(tf.convert_to_tensor, slots)
    total = mesh_impl.slicewise(_plus, so_far, part)
    if open_axes:  # all-reduce, over the axes that the value is a sum over
      total = mtf.LazyAllreduceSum(mesh_impl, total, open_axes)
    lowering.set_tensor_lowering(self.outputs[0], total)


def _lay_out(
  lowering: mtf.Lowering, accumulator: mtf.Variable, value: mtf.Tensor
) -> tuple[object, object, list[int]]:
  """Returns both laid out, and the axes over which a sum is pending."""
  # Each slice adds up its own part of a sum over a split dimension. The parts
  # are all-reduced when the sum is read, once per step.
  slots = lowering.variables[accumulator].laid_out_tensor
  laid_out = lowering.tensors[value]
  if isinstance(laid_out, mtf.LazyAllreduceSum):
    return slots, laid_out.laid_out_input, laid_out.mesh_axes
  return slots, laid_out.to_laid_out_tensor(), []


def accumulate_sums(
  sums: Sums, variables: Sequence[mtf.Variable], is_first: tf.Tensor
) -> tuple[Sums, list[Accumulate]]:
  """Returns the sums of a step, read on its last microbatch.

  Args:
    sums: sums of one microbatch.
    variables: trained variables.
    is_first: whether this microbatch is the first of its step, [], bool.

  Returns:
    The sums, and the operations of each microbatch but the last.
  """
  terms = sums.losses.terms
  values = {f"{name}_sum": value for name, value in terms.items()}
  values["weight_sum"] = sums.losses.weight
  for variable, gradient in zip(variables, sums.gradients, strict=True):
    values[f"{variable.name}/gradient_sum"] = gradient
  accumulations = [
    Accumulate(name, value, is_first) for name, value in values.items()
  ]
  totals = iter([AccumulatedSum(x).outputs[0] for x in accumulations])
  losses = LossSums({name: next(totals) for name in terms}, next(totals))
  return Sums(losses, list(totals)), accumulations


def exchange_sums(pods: Sequence[Sums], dtype: tf.DType) -> list[Sums]:
  """Returns for each pod the sums over all pods.

  Args:
    pods: sums of each pod, on its mesh.
    dtype: dtype in which gradients are sent.
  """
  if len(pods) == 1:
    return list(pods)
  # Every device sends its copy of the few other numbers, as float32.
  names = list(pods[0].losses.terms)
  numbers = zip(
    *([*x.losses.terms.values(), x.losses.weight] for x in pods), strict=True
  )
  exchanged = [[Exchange(x, y.mesh).outputs[0] for y in x] for x in numbers]
  for gradients in zip(*(x.gradients for x in pods), strict=True):
    # No two devices of a pod send the same numbers. A pod's own term is rounded
    # to `dtype` too, so that all pods add the same numbers.
    own = [OwnPart(x, dtype) for x in gradients]
    parts = [x.outputs[0] for x in own]
    exchanged.append([Exchange(parts, x.mesh, x).outputs[0] for x in own])
  sums = []
  for of_pod in zip(*exchanged, strict=True):
    terms, (weight, *gradients) = of_pod[: len(names)], of_pod[len(names) :]
    losses = LossSums(dict(zip(names, terms, strict=True)), weight)
    sums.append(Sums(losses, gradients))
  return sums
