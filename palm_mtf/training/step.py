# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the training steps of a session, call by call of their plan."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.programs.step_programs import StepPrograms
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program
from palm_mtf.steps.plan import Call, StepPlan


class NonFiniteStepError(Exception):
  """A step's loss or gradients are not finite; the step changed no variable."""

  def __init__(
    self, step: int, losses: dict[str, float], gradient_squares: np.ndarray
  ):
    super().__init__(step, losses)
    self.step = step  # counted from 1
    self.losses = losses  # terms of the loss, and grad_norm, by name
    # Sum of squares of each parameter's gradient, [parameters].
    self.gradient_squares = gradient_squares


class TrainStep:
  """Runs steps of one batch size; computes losses of validation batches."""

  def __init__(self, client: Client, programs: StepPrograms):
    """Takes the client in whose graph `programs` were built."""
    self._client, self.programs = client, programs
    self._is_first = True
    # Step before which the optimizer's slots were 0.
    self.slot_start = 0
    self.first_pod = programs.devices.first_pod
    # Pods that exchange gradients have no other parameters to validate.
    self.showing_outer: Callable[[], contextlib.AbstractContextManager[None]]
    self.showing_outer = contextlib.nullcontext

  def run(
    self,
    batch: Batch | str,
    step: int,
    records: list[tf.RunMetadata] | None = None,
  ) -> dict[str, float]:
    """Trains on a batch; returns the metrics of the step, by name.

    Args:
      batch: arrays of the program's features; if servers read the batches, the
        JSON that describes all batches.
      step: number of steps done before.
      records: list to which each call's trace is added; None to trace nothing.

    Raises:
      NonFiniteStepError: the loss or the gradients are not finite.
    """
    options = None
    if records is not None:
      # A process can do only one full trace at a time. Without servers, all
      # pods' calls are in this process and overlap, so trace only in software.
      has_servers = "/job:" in self.programs.devices.client
      level = "FULL_TRACE" if has_servers else "SOFTWARE_TRACE"
      options = tf.RunOptions(trace_level=level)
    elif self._is_first:
      options = self.programs.first_options
    self._is_first = False

    def more() -> dict[str, Any]:
      record = None
      if records is not None:
        record = tf.RunMetadata()
        records.append(record)
      return {"options": options, "run_metadata": record}

    plan = self.programs.plan
    self._run_streams(plan, batch, step, more)
    program, inputs = self._prepare(plan.last, batch, step)
    try:
      return _to_floats(self._client.call(program, inputs, **more()))
    except tf.errors.InvalidArgumentError:
      # The graph has refused the update. Compute the step again without the
      # update, to find out which values are not finite.
      measure = self.programs.measure
      losses, squares, is_finite = self._client.call(measure, inputs)
      if is_finite:
        raise  # the error has another cause
      raise NonFiniteStepError(step + 1, _to_floats(losses), squares) from None

  def run_loop(
    self, batches: Sequence[Batch], step: int
  ) -> list[dict[str, float]]:
    """Trains on batches in one call; returns the metrics of each step, by name.

    Args:
      batches: batch of each step, at most STEPS_PER_LOOP batches.
      step: number of steps done before.

    Raises:
      NonFiniteStepError: the loss or the gradients of a step are not finite;
        the steps before that step are done.
    """
    loop = self.programs.loop
    fed = {"step": step, "num_steps": len(batches)}
    # Inputs are [steps, ...]; the rows of steps that are not run stay 0.
    for name in loop.inputs.keys() - fed.keys():
      placeholder = loop.inputs[name]
      dtype = placeholder.dtype.as_numpy_dtype
      fed[name] = np.zeros(placeholder.shape, dtype)
      fed[name][: len(batches)] = [batch[name] for batch in batches]
    metrics, num_done, is_finite = self._client.call(loop, fed)
    done = [
      {name: float(by_step[i]) for name, by_step in metrics.items()}
      for i in range(num_done)
    ]
    if not is_finite:
      bad, last = num_done - 1, self.programs.plan.last
      _, inputs = self._prepare(last, batches[bad], step + bad)
      measured = self._client.call(self.programs.measure, inputs)
      losses, squares, _ = measured
      raise NonFiniteStepError(step + num_done, _to_floats(losses), squares)
    return done

  def losses(self, batch: Batch) -> Iterator[Sequence[float]]:
    """Yields (*means of VALIDATED, sum of weights) per pod and microbatch."""
    outputs = self._run_streams(self.programs.losses, batch)
    of_pods = (x for x in outputs if x[0])
    for of_microbatch in zip(*of_pods, strict=True):
      yield from of_microbatch

  def _run_streams(
    self,
    plan: StepPlan,
    batch: Batch | str,
    step: int = -1,
    more: Callable[[], dict[str, Any]] = dict,
  ) -> list[list[Any]]:
    """Runs the streams of a plan; returns the outputs of their calls."""

    def list_calls(stream: Sequence[Call]) -> Iterator:
      for call in stream:
        yield *self._prepare(call, batch, step), more()

    # The calls of a pipeline wait for each other, so they must run at the same
    # time. Ask the scheduler, which shares devices among clients, once for all.
    turn = Program() if plan.has_pipeline else None
    return self._client.call_all(map(list_calls, plan.streams), turn)

  def _prepare(
    self, call: Call, batch: Batch | str, step: int
  ) -> tuple[Program, dict[str, object]]:
    """Returns the program of a call, and its inputs."""
    program, rows = self.programs.programs[call.nodes], self.programs.rows
    values = {"step": step, "microbatch": call.microbatch, "batches": batch}
    values["slot_step"] = step - self.slot_start
    values["first_pod"] = self.first_pod
    for name in program.inputs.keys() - values.keys():
      feature, first, size = rows[name]
      first += call.microbatch * size
      values[name] = batch[feature][first : first + size]
    return program, {name: values[name] for name in program.inputs}


def _to_floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
