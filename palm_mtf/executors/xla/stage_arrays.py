# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Functions by which a client runs one host's part of a pipeline stage.

pod_arrays.py has the functions for pods without stages.

A stage passes the residual stream, or the stream's gradient, to the next stage.
If this process holds both stages, the stream stays on the devices, and the next
stage takes the stream from the sender's `DeviceStore`. Otherwise the sender's
call returns the stream to TensorFlow, which sends the stream to the other host.

No function here blocks until another stage finishes. TensorFlow orders the
calls: it starts a call after the sender's call has returned the stream or, if
the stream stays on the devices, a 0.
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

# Whether this process or another process holds the stage that takes the stream.
HERE, AWAY = b"here", b"away"

# Keys of `DeviceStore.values`:
# (_KEPT, microbatch): what the forward pass keeps for the backward pass;
# (_OF_HEAD, microbatch): what the head keeps for the backward pass of stage 0;
# _SUMS: gradients of the stage's variables, summed over microbatches;
# _HEAD_SUMS: losses and gradients of the head, summed over microbatches;
# _GRADIENTS: the step's gradients, for the update;
# _RETURNED: what the step's last call has returned, to return it again.
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
    pod: `PodName` of the stage, as JSON.
    settings: `StepSettings` as JSON.
    phase: FORWARD, HEAD, BACKWARD, INFER or INFER_HEAD.
    microbatch: number of the microbatch in the step, [] int32.
    dropout_state: state of dropout, [4] int32.
    source: if a stage of this process passes the stream to this stage, the
      `PodName` of that stage; else b"".
    source_phase: phase of the pass that sends the stream, in this process or
      in another; b"" if the pass takes no stream.
    target: HERE if a stage in this process takes the stream after the pass;
      AWAY if a stage in another process takes the stream; else b"".
    given: if another process sends the stream, one array [1, ...] per device of
      this host; then, if the pass reads rows, one array [rows, ...] per
      feature.

  Returns:
    If `target` is AWAY, the stream as one array [1, ...] per device of this
    host; for INFER_HEAD, the losses, [losses] float32; otherwise 0.
  """
  held, programs = open_pod(pod, settings)
  taken, rows = None, list(given)
  if source:
    # Both stages run the microbatches in the same order, so the oldest stream
    # is the stream for this microbatch.
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

  Each method takes the residual stream, or the stream's gradient, before the
  pass, and returns it after the pass; or None if no stage needs it. `_infer` of
  the head returns the losses.
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
    # Only stage 0 runs the head, so other stages keep no results of the head.
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


# The client runs the functions below in the last call of a step. If a loss or
# gradient is not finite, the client repeats that call, to report which loss or
# gradient. The first call has used up the sums, so these functions keep the
# gradients and results in the store until an update succeeds.


@pod_function
def sum_gradients(pod: bytes, settings: bytes) -> tuple[np.ndarray, ...]:
  """Sums a stage's gradients over the stage's devices, if there is one pod.

  Returns:
    The sums of the losses, [losses] float32, in stage 0, else a tensor [0]; and
    the gradients' sums of squares, [squares] float32 (`StageStep.total`).
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
  """Cuts a stage's gradients into messages to the same stage of other pods.

  Returns the sums of the losses, [losses] float32, in stage 0, else a tensor
  [0]; and then the messages, as `pod_arrays.find_gradients` does.
  """
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
  """Keeps gradients that are summed over all pods; `parts` are the messages.

  Returns the gradients' sums of squares, [squares] float32.
  """
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
  """Returns sums of squares of variables and updates (`StageStep.measure`).

  Args:
    pod, settings: as in `run_pass`.
    rates: the optimizer's `RATES` for the step, such as the learning rate,
      [rates] float32.
    losses: sums of the losses over all pods, [losses] float32.
    squares: the gradients' sums of squares in all stages, [squares] float32.

  Returns:
    The sums for this stage, [sums] float32.
  """
  held, programs = open_pod(pod, settings)
  changed = programs.stage_step.select_changed(held.arrays)
  given = changed, held.values[_GRADIENTS], rates, losses, squares
  found = programs.stage_step.measure(*given)
  return np.array(found.addressable_data(0))


@pod_function
def update_variables(
  pod: bytes, settings: bytes, *numbers: np.ndarray
) -> np.ndarray:
  """Updates the variables of the stage (`StageStep.update`).

  `numbers` are `rates`, `losses` and `squares` of `measure_variables`; then the
  results of `measure_variables` in all stages, joined, [sums] float32.

  Returns the metrics of the step, [metrics] float32.
  """
  held, programs = open_pod(pod, settings)
  changed = programs.stage_step.select_changed(held.arrays)
  given = changed, held.values[_GRADIENTS], *numbers
  changed, found = programs.stage_step.update(*given)
  held.arrays |= changed
  values = np.array(found.addressable_data(0))
  if values[programs.pod_step.find_number("is_finite")] > 0:
    _forget_step(held)
  return values
