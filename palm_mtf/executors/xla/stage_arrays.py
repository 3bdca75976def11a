# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The part of a pipeline stage that one host holds, like pod_arrays.py.

A stage passes the residual stream, or its gradient, to the next stage. If this
process has both stages, the stream stays on devices: the next stage takes it
from the `DeviceStore` of the stage. Otherwise a call returns the stream to
TensorFlow, which sends it to the other host.

A call never waits for another stage. It begins when TensorFlow has the stream,
or the 0 that the call of the other stage returns instead.
"""

import collections
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from palm_mtf.executors.xla.device_store import DeviceStore, find_store
from palm_mtf.executors.xla.host_calls import pod_function
from palm_mtf.executors.xla.pod_arrays import (
  PodPrograms,
  cut_messages,
  join_messages,
  open_pod,
)
from palm_mtf.steps.plan import BACKWARD, FORWARD, HEAD

# Phases of a pass that computes losses without gradients.
INFER, INFER_HEAD = "infer", "infer_head"

# Where the stage is that takes the stream.
HERE, AWAY = b"here", b"away"

# Keys of a `DeviceStore`: what a forward pass, or the head, keeps for the
# backward pass of a microbatch; sums over microbatches, of the stage's and of
# the head's variables; and, of the last call of a step, the gradients and what
# the host has returned.
_KEPT, _OF_HEAD, _SUMS, _HEAD_SUMS = "kept", "of_head", "sums", "head_sums"
_GRADIENTS, _RETURNED = "gradients", "returned"


@pod_function
def run_pass(
  pod: bytes,
  settings: bytes,
  phase: bytes,
  microbatch: np.int32,
  dropout_state: np.ndarray,
  source: bytes,
  source_phase: bytes,
  target: bytes,
  *given: np.ndarray,
) -> tuple[np.ndarray, ...]:
  """Runs a pass of the stage for a microbatch.

  Args:
    phase: FORWARD, HEAD, BACKWARD, INFER or INFER_HEAD.
    dropout_state: state of dropout, [4] int32.
    source: `PodName` of the stage of this process that passes the stream to
      this stage; b"" if none does.
    source_phase: the phase in which `source` does so; b"" if no stage does.
    target: HERE if a stage of this process takes the stream after the pass,
      AWAY if one of another process does; b"" if none does.
    given: if the stream is from another process, its value on each device of
      this host; then the features, if the pass reads rows.

  Returns:
    The stream's value on each device of this host, if `target` is AWAY; the
    losses, [losses] float32, for INFER_HEAD; otherwise 0.
  """
  held, programs = open_pod(pod, settings)
  taken, rows = None, list(given)
  if source:
    # A stage passes its results on in the order in which the next takes them.
    passed = find_store(source).values[source_phase]
    taken = programs.move(passed.popleft())
  elif source_phase:
    count = len(programs.local)
    taken, rows = programs.join_each(given[:count]), rows[count:]
  run = _Pass(held, programs, int(microbatch), dropout_state, rows)
  found = run.by_phase[phase.decode()](taken)
  if phase.decode() == INFER_HEAD:
    return (np.array(found.addressable_data(0)),)
  if target == AWAY:
    return tuple(np.array(x) for x in programs.slices(found).values())
  if target == HERE:
    held.values.setdefault(phase, collections.deque()).append(found)
  return (np.int32(0),)


class _Pass:
  """A pass of a stage for a microbatch.

  Its methods take the residual stream, or its gradient, and return the same
  after the pass, or None if no stage needs it.
  """

  def __init__(
    self,
    held: DeviceStore,
    programs: PodPrograms,
    microbatch: int,
    dropout_state: np.ndarray,
    rows: Sequence[np.ndarray],
  ):
    self._held, self._step = held, programs.stage_step
    self._microbatch, self._dropout_state = microbatch, dropout_state
    self._rows = programs.put_batch(rows) if rows else None
    self._variables = self._step.read(held.arrays)
    self.by_phase: dict[str, Callable[..., Any]] = {
      FORWARD: self._forward,
      HEAD: self._head,
      BACKWARD: self._backward,
      INFER: functools.partial(self._infer, self._step.infer),
      INFER_HEAD: functools.partial(self._infer, self._step.infer_head),
    }

  def _forward(self, x: jax.Array | None) -> jax.Array:
    given = self._variables, self._rows, self._dropout_state
    x, kept = self._step.forward(*given, x)
    if self._step.has_backward:
      of_pass = self._rows, self._dropout_state, kept
      self._held.values[_KEPT, self._microbatch] = of_pass
    return x

  def _head(self, x: jax.Array) -> jax.Array | None:
    given = self._variables, self._rows, self._dropout_state, x
    x, of_head, sums = self._step.head(*given, self._take_sums(_HEAD_SUMS))
    self._held.values[_HEAD_SUMS] = sums
    self._held.values[_OF_HEAD, self._microbatch] = of_head
    return x

  def _backward(self, x: jax.Array) -> jax.Array | None:
    values = self._held.values
    rows, dropout_state, kept = values.pop((_KEPT, self._microbatch))
    # Only stage 0 has what the head gives.
    of_head = values.pop((_OF_HEAD, self._microbatch), [])
    given = self._variables, rows, dropout_state, kept, of_head, x
    x, values[_SUMS] = self._step.backward(*given, self._take_sums(_SUMS))
    return x

  def _infer(self, program: Callable[..., Any], x: jax.Array | None) -> Any:
    return program(self._variables, self._rows, x)

  def _take_sums(self, key: str) -> dict[str, jax.Array]:
    if self._microbatch:
      return self._held.values.pop(key)
    _forget_step(self._held)
    return self._step.zeros(key == _HEAD_SUMS)


def _forget_step(held: DeviceStore) -> None:
  for key in (_GRADIENTS, _RETURNED):
    held.values.pop(key, None)


def _pop_sums(held: DeviceStore) -> dict[str, jax.Array]:
  """Returns the sums of the stage's gradients and, in stage 0, the head's."""
  sums = [held.values.pop(x, {}) for x in (_HEAD_SUMS, _SUMS)]
  return sums[0] | sums[1]


# The functions below are parts of one call of the client. If a loss is not
# finite, the client repeats the call, to find out which. So they keep what they
# have made until an update succeeds.


@pod_function
def sum_gradients(pod: bytes, settings: bytes) -> tuple[np.ndarray, ...]:
  """Sums the gradients over the devices of the stage of the only pod.

  Returns:
    Sums of the losses, [losses] float32, of a stage with the head, else [0];
    and the gradients' sums of squares (`StageStep.total`).
  """
  held, programs = open_pod(pod, settings)
  if _RETURNED not in held.values:
    gradients, *numbers = programs.stage_step.total(_pop_sums(held))
    held.values[_GRADIENTS] = gradients
    of_host = [np.array(x.addressable_data(0)) for x in numbers]
    held.values[_RETURNED] = tuple(of_host)
  return held.values[_RETURNED]


@pod_function
def cut_gradients(pod: bytes, settings: bytes) -> tuple[np.ndarray, ...]:
  """Returns the losses, and messages to other pods; see `find_gradients`."""
  held, programs = open_pod(pod, settings)
  if _RETURNED not in held.values:
    step = programs.stage_step
    parts, losses = step.parts(_pop_sums(held))
    messages = cut_messages(programs, step.gradients, parts)
    held.values[_RETURNED] = np.array(losses.addressable_data(0)), *messages
  return held.values[_RETURNED]


@pod_function
def join_gradients(
  pod: bytes, settings: bytes, *parts: np.ndarray
) -> np.ndarray:
  """Takes gradients summed over all pods; returns their sums of squares."""
  held, programs = open_pod(pod, settings)
  joined = join_messages(programs, programs.stage_step.gradients, parts)
  held.values[_GRADIENTS], squares = programs.stage_step.join(joined)
  return np.array(squares.addressable_data(0))


@pod_function
def measure_variables(
  pod: bytes,
  settings: bytes,
  rates: np.ndarray,
  losses: np.ndarray,
  squares: np.ndarray,
) -> np.ndarray:
  """Returns sums of squares of variables and updates (`StageStep.measure`)."""
  held, programs = open_pod(pod, settings)
  changed, _ = programs.pod_step.split(held.arrays)
  given = changed, held.values[_GRADIENTS], rates, losses, squares
  found = programs.stage_step.measure(*given)
  return np.array(found.addressable_data(0))


@pod_function
def update_variables(
  pod: bytes, settings: bytes, *numbers: np.ndarray
) -> np.ndarray:
  """Updates the variables of the stage (`StageStep.update`).

  `numbers` are the rates, and the losses and squares of all stages and pods, as
  in `measure_variables`; then what that function returns in all stages.

  Returns the metrics of the step, [metrics] float32.
  """
  held, programs = open_pod(pod, settings)
  changed, _ = programs.pod_step.split(held.arrays)
  given = changed, held.values[_GRADIENTS], *numbers
  changed, found = programs.stage_step.update(*given)
  held.arrays |= changed
  values = np.array(found.addressable_data(0))
  if values[programs.pod_step.find_number("is_finite")] > 0:
    _forget_step(held)
  return values
