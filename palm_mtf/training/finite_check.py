# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The check for NaN and infinity, which stop a run and are never saved."""

import math
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint, last_good
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import Slice, names_of
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.training.step import NonFiniteStepError


class FiniteCheck:
  """Finds the variables of a session that are not finite."""

  def __init__(
    self,
    session: tf.Session,
    program: TrainProgram,
    newest: Callable[[], Checkpoint | None],
  ):
    """Adds the check to the graph of `program`.

    Args:
      session: session of the program.
      program: training program.
      newest: function that returns the newest checkpoint, for messages.
    """
    self._newest = newest
    self._parameters = program.parameters
    self._variables = names_of(program.slices)
    self._finite = session.make_callable(build_finite_check(program.slices))

  def error_of_step(self, bad: NonFiniteStepError) -> UserError:
    """Returns the message about a step, which names a tensor."""
    numbers = ", ".join(f"{name} = {x}" for name, x in bad.losses.items())
    return UserError(
      f"{numbers} at step {bad.step}: training has diverged; the first tensor "
      f"that is not finite is {self._first_non_finite(bad)}. {self._advice()}"
    )

  def check_variables(self, step: int) -> None:
    """Raises UserError unless all variables are finite after `step` steps."""
    # An update may overflow where the gradients did not.
    if bad := self._non_finite_variables():
      raise UserError(
        f"{bad[0]} is not finite after step {step} (as are {len(bad) - 1} "
        f"other variables): training has diverged. {self._advice()}"
      )

  def _first_non_finite(self, bad: NonFiniteStepError) -> str:
    # In the order of computation. The step has changed no variable
    # (optim/clip.py): parameters are still those that it began with.
    variables = self._non_finite_variables()
    for name in self._parameters:
      if name in variables:
        return f"the parameter {name}, before the step"
    for name, value in bad.losses.items():
      if name != "grad_norm" and not math.isfinite(value):
        return f"the {name}, of parameters that all are"
    # The backward pass goes from the last layer to the first.
    for name, squares in reversed(
      list(zip(self._parameters, bad.gradient_squares, strict=True))
    ):
      if not math.isfinite(squares):
        return f"the gradient of {name}"
    return "the sum of all gradients' squares"

  def _non_finite_variables(self) -> list[str]:
    """Returns the names of variables, parameters first."""
    finite = dict(zip(self._variables, self._finite(), strict=True))
    slots = [name for name in finite if name not in self._parameters]
    return [x for x in (*self._parameters, *slots) if not finite[x]]

  def _advice(self) -> str:
    return (
      "Nothing of it is saved; lower LEARNING_RATE. "
      f"{last_good(self._newest())}"
    )


def build_finite_check(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns whether each variable is finite, [variables], bool.

  Args:
    slices: slices of every variable, in the order of the result.
  """
  # Each slice is reduced on the device that holds it: one bool of each variable
  # leaves a device.
  of_devices = []
  for parts in zip(*slices.values(), strict=True):
    flags = [flag for part in parts for flag in _are_finite(part)]
    with tf.device(parts[0].near):
      of_devices.append(tf.stack(flags))
  with tf.device(of_devices[0].device):
    return tf.reduce_all(of_devices, axis=0)


def _are_finite(part: Slice) -> list[tf.Tensor]:
  """Returns whether a slice of each of its variables is finite, [] bool."""
  value = part.read()
  with tf.device(part.near):
    axes = range(1 if len(part.names) > 1 else 0, value.shape.rank)
    return part.rows(tf.reduce_all(tf.math.is_finite(value), axis=[*axes]))
