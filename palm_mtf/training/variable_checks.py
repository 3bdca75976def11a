# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Checks that all variables are finite, and the same on every pod.

If a check fails, the run stops, and does not save the bad variables. Checks are
fast: each device sends the client only a bool or an integer per variable.
"""

import collections
import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint, last_good
from palm_mtf.errors import UserError
from palm_mtf.mesh.slices import Slice, names_of, variables_of
from palm_mtf.ops.xla import fused
from palm_mtf.programs.outer import OuterPrograms
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program, state_of
from palm_mtf.training.step import NonFiniteStepError

_OF_POD = re.compile(r"^pods/\d+/")  # begins the names of a pod's variables


class VariableChecks:
  """Checks that a session's variables are finite, and equal on all pods."""

  def __init__(
    self,
    client: Client,
    program: StepPrograms,
    newest: Callable[[], Checkpoint | None],
    outer: OuterPrograms | None = None,
  ):
    """Builds the program that finds variables that are not finite.

    Args:
      client: the client in whose graph `program` was built.
      program: a training step.
      newest: returns the newest checkpoint or None, for error messages.
      outer: the syncs of pods that differ between them; None if pods are equal.
    """
    self._newest, self._client = newest, client
    self._parameters = program.parameters
    self._pods = outer.equal if outer else program.pod_slices
    checked = [self._pods[0], *(outer.own if outer else ())]
    self._variables = [name for x in checked for name in names_of(x)]
    with client.graph.as_default():
      finite = [build_finite_check(x) for x in checked]
    self._finite = Program(
      outputs=finite, reads=state_of(variables_of(checked))
    )

  def make_step_error(self, bad: NonFiniteStepError) -> UserError:
    """Returns an error that names the first non-finite tensor of a step."""
    numbers = ", ".join(f"{name} = {x}" for name, x in bad.losses.items())
    return UserError(
      f"{numbers} at step {bad.step}: training has diverged; the first tensor "
      f"that is not finite is {self._find_first_non_finite(bad)}. "
      f"{self._make_advice()}"
    )

  def check_finite(self, step: int) -> None:
    """Raises UserError unless all variables are finite after `step` steps."""
    # Even if all gradients are finite, an update may overflow.
    if bad := self._find_non_finite_variables():
      raise UserError(
        f"{bad[0]} is not finite after step {step} (as are {len(bad) - 1} "
        f"other variables): training has diverged. {self._make_advice()}"
      )

  def _find_first_non_finite(self, bad: NonFiniteStepError) -> str:
    # Search in the order of computation. Parameters still have their values
    # from before the bad step, because that step has changed no variable.
    for name in self._find_non_finite_variables():
      if _OF_POD.sub("", name) in self._parameters:
        return f"the parameter {name}, before the step"
    for name, value in bad.losses.items():
      if name != "grad_norm" and not math.isfinite(value):
        return f"the {name}, of parameters that all are"
    # Search from the last layer to the first, as the backward pass goes.
    for name, squares in reversed(
      list(zip(self._parameters, bad.gradient_squares, strict=True))
    ):
      if not math.isfinite(squares):
        return f"the gradient of {name}"
    return "the sum of all gradients' squares"

  def _find_non_finite_variables(self) -> list[str]:
    # Parameters come first, because a message names the first variable.
    flags = np.concatenate(self._client.call(self._finite))
    finite = dict(zip(self._variables, flags, strict=True))
    others = [name for name in finite if name not in self._parameters]
    return [x for x in (*self._parameters, *others) if not finite[x]]

  def _make_advice(self) -> str:
    return (
      "This step is not saved; lower LEARNING_RATE. "
      f"{last_good(self._newest())}"
    )

  def check_replicas(self, step: int) -> None:
    """Raises UserError if pods hold different values after `step` steps."""
    # Pods start with the same variables and apply the same updates. If a pod
    # differs, the pod's memory, network or processor is at fault.
    if len(self._pods) == 1:
      return
    numbers = np.stack(self._client.call(self._fingerprints))
    differ = np.flatnonzero((numbers != numbers[0]).any(axis=0))
    if not len(differ):
      return
    name, pods = self._variables[differ[0]], numbers[:, differ[0]].tolist()
    others = len(differ) - 1
    more = f" (as are {others} other variables)" if others else ""
    raise UserError(
      f"{name} is not the same on {_name_pods(pods)} after step {step}{more}: "
      "a pod's memory, network or processor is at fault. This step is not "
      "saved; continue without that pod's machine. "
      f"{last_good(self._newest())}"
    )

  @functools.cached_property
  def _fingerprints(self) -> Program:
    """A program that returns, per pod, a hash of each variable: [variables]."""
    # Build it at the first check, so that the first step does not wait for it.
    with self._client.graph.as_default():
      pods = [build_fingerprints(slices) for slices in self._pods]
    return Program(outputs=pods, reads=state_of(variables_of(self._pods)))


def build_finite_check(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns whether each variable in `slices` is finite, [variables], bool."""
  by_device = []
  for parts in zip(*slices.values(), strict=True):
    flags = [flag for part in parts for flag in _are_finite(part)]
    with tf.device(parts[0].near):
      by_device.append(tf.stack(flags))
  with tf.device(by_device[0].device):
    return tf.reduce_all(by_device, axis=0)


def _are_finite(part: Slice) -> list[tf.Tensor]:
  """Returns [] bool per variable in `part`: whether its values are finite."""
  value = part.read()
  with tf.device(part.near):
    axes = range(1 if len(part.names) > 1 else 0, value.shape.rank)
    return part.rows(tf.reduce_all(tf.math.is_finite(value), axis=[*axes]))


def _name_pods(numbers: list[int]) -> str:
  """Names pods without the majority's hash; all if no hash has a majority."""
  ((most, count),) = collections.Counter(numbers).most_common(1)
  few = [str(pod) for pod, number in enumerate(numbers) if number != most]
  if 2 * count <= len(numbers):
    few = [str(pod) for pod in range(len(numbers))]
  *others, last = few
  listed = f"{', '.join(others)} and {last}" if others else last
  where = " as on all others" if 2 * count > len(numbers) else ""
  return f"{'pods' if others else 'pod'} {listed}{where}"


_BITS = {tf.float32: tf.uint32, tf.bfloat16: tf.uint16}


@fused
def _fingerprint_rows(x):
  """Returns sum_i (bits of element i) * (2 i + 1) mod 2^64 per row, int64."""
  bits = tf.cast(tf.bitcast(x, _BITS[x.dtype]), tf.int64)
  place = tf.range(x.shape[1], dtype=tf.int64)
  return tf.reduce_sum(bits * (2 * place + 1), axis=1)


def build_fingerprints(slices: Mapping[str, Sequence[Slice]]) -> tf.Tensor:
  """Returns a hash of each variable in `slices`, [variables], int64."""
  # fingerprint = sum over slices s and elements i of
  #                 (bits of element i) * (2 i + 1) * (2 s + 1)   mod 2^64
  #
  # Integers have the same sum in any order. Odd factors have inverses mod 2^64,
  # so the sum changes if an element changes. It also changes if two elements of
  # a slice are swapped, because their factors differ.
  first, *_ = (part for parts in slices.values() for part in parts)
  with tf.device(first.near):
    return tf.concat(
      [_fingerprint_variables(x) for x in slices.values()], axis=0
    )


def _fingerprint_variables(parts: Sequence[Slice]) -> tf.Tensor:
  numbers = []
  for index, part in enumerate(parts):
    value = part.read()
    with tf.device(part.near):
      rows = tf.reshape(value, [len(part.names), -1])
      # Each slice has another factor, so that a swap of slices changes the sum.
      numbers.append(_fingerprint_rows(rows) * (2 * index + 1))
  return tf.add_n(numbers)
