# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Infinity or what is no number stops a run, and is never saved.

A step whose loss or gradients are not all finite changes no variable
(optim/clip.py), so that afterwards the variables are still those that it began
with. The tensor that is named is the first bad one in the order of computation:
the parameters as the model reads them, the loss, the z-loss, the gradients from
the last layer back to the first.

An update may overflow where its gradients did not, hence all variables are
looked at before each checkpoint: each slice on the device that holds it. One
truth value a variable leaves it.
"""

import math
from collections.abc import Callable, Mapping, Sequence

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import Slice, names_of
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.training.step import BadStepError


class FiniteCheck:
  """Looks at what a session's steps leave behind."""

  def __init__(
    self,
    session: tf.Session,
    program: TrainProgram,
    newest: Callable[[], Checkpoint | None],
  ):
    """Adds what it looks at to the graph of `program`.

    Args:
      session: holds the variables.
      program: what is run.
      newest: returns the last good checkpoint, for messages.
    """
    self._newest = newest
    self._parameters = program.parameters
    self._variables = names_of(program.slices)
    self._finite = session.make_callable(build_finite_check(program.slices))

  def error_of_step(self, bad: BadStepError) -> UserError:
    """Returns what to tell the user."""
    numbers = ", ".join(f"{name} = {x}" for name, x in bad.losses.items())
    return UserError(
      f"{numbers} at step {bad.step}: training has diverged; the first tensor "
      f"that is not finite is {self._first_bad(bad)}. {self._advice()}"
    )

  def check_variables(self, step: int) -> None:
    """Raises UserError unless all variables are finite after `step` steps."""
    if bad := self._bad_variables():
      raise UserError(
        f"{bad[0]} is not finite after step {step} (as are {len(bad) - 1} "
        f"other variables): training has diverged. {self._advice()}"
      )

  def _first_bad(self, bad: BadStepError) -> str:
    bad_variables = self._bad_variables()
    for name in self._parameters:
      if name in bad_variables:
        return f"the parameter {name}, before the step"
    for name in ("loss", "z_loss"):
      if not math.isfinite(bad.losses[name]):
        return f"the {name}, of parameters that all are"
    for name, squares in reversed(
      list(zip(self._parameters, bad.gradient_squares, strict=True))
    ):
      if not math.isfinite(squares):
        return f"the gradient of {name}"
    return "the sum of all gradients' squares"

  def _bad_variables(self) -> list[str]:
    """Returns the names of those that are not finite, parameters first."""
    finite = dict(zip(self._variables, self._finite(), strict=True))
    slots = [name for name in finite if name not in self._parameters]
    return [x for x in (*self._parameters, *slots) if not finite[x]]

  def _advice(self) -> str:
    newest = self._newest()
    return "Nothing of it is saved; lower LEARNING_RATE. " + (
      f"The last good checkpoint is {newest.path}."
      if newest
      else "There is no checkpoint yet."
    )


def build_finite_check(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns whether each variable is finite throughout, [variables], bool.

  Args:
    slices: slices of every variable; their names' order is that of the result.
  """
  first, *_ = (part for parts in slices.values() for part in parts)
  with tf.device(first.near):
    return tf.concat(
      [
        tf.reduce_all([_are_finite(x) for x in parts], axis=0)
        for parts in slices.values()
      ],
      axis=0,
    )


def _are_finite(part: Slice) -> tf.Tensor:
  """Returns whether a slice of each variable is, [names], bool."""
  value = part.read()
  with tf.device(part.near):
    of_names = tf.reshape(value, [len(part.names), -1])
    return tf.reduce_all(tf.math.is_finite(of_names), axis=1)
