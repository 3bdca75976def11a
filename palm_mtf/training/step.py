# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the training steps of a session, microbatch by microbatch."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.accounting.pipeline import BACKWARD, FORWARD, HEAD, Pass
from palm_mtf.data.batches.corpus import Batch
from palm_mtf.mesh.session import ONE_BY_ONE
from palm_mtf.mesh.slices import variables_of
from palm_mtf.programs.train_program import (
  PodProgram,
  StageProgram,
  TrainProgram,
)
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import Program, state_of


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

  def __init__(self, client: Client, program: TrainProgram):
    """Takes the client in whose graph `program` was built."""
    self._client, self.program = client, program
    # {name of an input: (pod, feature)}: which rows of the batch to feed. If a
    # stage has several servers, each server has an input per feature.
    self._rows: dict[str, tuple[int, str]] = {}
    # For each pipeline stage, and each output head, of each pod: {FORWARD, HEAD
    # or BACKWARD: program that runs this pass for one microbatch}.
    self._passes: list[dict[str, Program]] = []
    # For each pod, the programs that compute a validation loss, one per stage
    # and one for the head. The last program returns the loss.
    self._evaluations: list[list[Program]] = []
    for i, pod in enumerate(program.pods):
      self._add_pod(i, pod)
    sums = frozenset().union(
      *(x.writes for each in self._passes for x in each.values())
    )
    variables = state_of(variables_of(program.pod_slices))
    devices = dict.fromkeys(itertools.chain(*program.devices.pods), 0)
    # Without pipeline stages, the call that updates the variables also computes
    # the last microbatch, so it needs this microbatch's rows.
    has_stages = len(program.pods[0].stages) > 1
    fed = self._find_inputs(
      {} if has_stages else {i: x.stages[0] for i, x in enumerate(program.pods)}
    )
    # Stages wait for each other, so their calls must run at the same time. Ask
    # the scheduler, which shares devices among clients, only once for all.
    self._turn = Program() if has_stages else None
    self._update = Program(
      inputs=fed,
      outputs=program.metrics,
      operations=[program.update],
      reads=sums,
      writes=variables,
      device_bytes=devices,
    )
    self._is_first = True
    # Finds what is not finite after an update failed; changes no variable.
    self._measure = Program(
      inputs=fed,
      outputs=[program.losses, program.gradient_squares, program.is_finite],
      reads=variables | sums,
      device_bytes=devices,
    )
    if loop := program.loop:
      self._run_loop = Program(
        inputs={
          **loop.features,
          "step": program.step,
          "num_steps": loop.num_steps,
        },
        outputs=[loop.metrics, loop.num_done, loop.is_finite],
        writes=variables | sums,
        device_bytes=devices,
      )

  def _add_pod(self, pod: int, built: PodProgram) -> None:
    devices = dict.fromkeys(self.program.devices.pods[pod], 0)
    variables = state_of(variables_of([built.slices]))

    def make(stage: int, operation: tf.Operation, inputs, outputs=()):
      # Calls that write the same state run one after another. Each stage has
      # its own state, so that stages compute at the same time.
      state = frozenset([f"sums of stage {stage}, pod {pod} on {[*devices]}"])
      return Program(inputs, outputs, [operation], variables, state, devices)

    self._evaluations.append([])
    for i, stage in enumerate(built.stages):
      inputs = self._find_inputs({pod: stage})
      is_head = i == len(built.stages) - 1 > 0
      passes = {HEAD if is_head else FORWARD: make(i, stage.forward, inputs)}
      if stage.backward is not None:
        passes[BACKWARD] = make(i, stage.backward, self._find_inputs({}))
      self._passes.append(passes)
      is_last = stage is built.stages[-1]
      loss = [built.loss, built.weight_sum] if is_last else ()
      rows = self._find_rows(pod, stage)
      self._evaluations[-1].append(make(i, stage.evaluate, rows, loss))

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
      has_servers = "/job:" in self.program.devices.client
      level = "FULL_TRACE" if has_servers else "SOFTWARE_TRACE"
      options = tf.RunOptions(trace_level=level)
    elif self._is_first and len(self.program.pods) > 1:
      # With this option, which servers ignore, pods of this process compile one
      # after another, so that later pods reuse the first pod's compiled code.
      options = ONE_BY_ONE
    self._is_first = False

    def more() -> dict[str, Any]:
      record = None
      if records is not None:
        record = tf.RunMetadata()
        records.append(record)
      return {"options": options, "run_metadata": record}

    last = self.program.num_microbatches - 1

    def list_calls(
      programs: Mapping[str, Program], passes: Sequence[Pass]
    ) -> Iterator:
      for kind, i in passes:
        inputs = self._make_inputs(programs[kind], batch, step, i)
        yield programs[kind], inputs, more()

    passes = self.program.passes * len(self.program.pods)
    self._client.call_all(map(list_calls, self._passes, passes), self._turn)
    # One call updates all pods, because they wait for each other's gradients.
    inputs = self._make_inputs(self._update, batch, step, last)
    try:
      return _to_floats(self._client.call(self._update, inputs, **more()))
    except tf.errors.InvalidArgumentError:
      # The graph has refused the update. Compute the step again without the
      # update, to find out which values are not finite.
      losses, squares, is_finite = self._client.call(self._measure, inputs)
      if is_finite:
        raise  # the error has another cause
      raise NonFiniteStepError(step + 1, _to_floats(losses), squares) from None

  def run_loop(
    self, batches: Sequence[Batch], step: int
  ) -> list[dict[str, float]]:
    """Trains on batches in one call; returns the metrics of each step, by name.

    Args:
      batches: batch of each step, at most `loop.max_steps` batches.
      step: number of steps done before.

    Raises:
      NonFiniteStepError: the loss or the gradients of a step are not finite;
        the steps before that step are done.
    """
    fed = {"step": step, "num_steps": len(batches)}
    # Inputs are [max_steps, ...]; the rows of steps that are not run stay 0.
    for name, placeholder in self.program.loop.features.items():
      dtype = placeholder.dtype.as_numpy_dtype
      fed[name] = np.zeros(placeholder.shape, dtype)
      fed[name][: len(batches)] = [batch[name] for batch in batches]
    metrics, num_done, is_finite = self._client.call(self._run_loop, fed)
    done = [
      {name: float(by_step[i]) for name, by_step in metrics.items()}
      for i in range(num_done)
    ]
    if not is_finite:
      bad, last = num_done - 1, self.program.num_microbatches - 1
      inputs = self._make_inputs(self._measure, batches[bad], step + bad, last)
      losses, squares, _ = self._client.call(self._measure, inputs)
      raise NonFiniteStepError(step + num_done, _to_floats(losses), squares)
    return done

  def losses(self, batch: Batch) -> Iterator[tuple[float, float]]:
    """Yields (mean loss, sum of loss weights) per pod and microbatch."""

    def list_calls(program: Program) -> Iterator:
      for i in range(self.program.num_microbatches):
        yield program, self._make_inputs(program, batch, -1, i), {}

    outputs = self._client.call_all(
      [list_calls(x) for of_pod in self._evaluations for x in of_pod],
      self._turn,
    )
    num_calls = len(self._evaluations[0])
    for of_microbatch in zip(*outputs[num_calls - 1 :: num_calls], strict=True):
      yield from of_microbatch

  def _find_rows(self, pod: int, stage: StageProgram) -> dict[str, tf.Tensor]:
    """Returns placeholders for the rows that a stage reads in a microbatch."""
    rows = {}
    for i, copy in enumerate((stage.features, *stage.copies)):
      for feature, placeholder in copy.items():
        name = f"pod_{pod}/copy_{i}/{feature}"
        rows[name], self._rows[name] = placeholder, (pod, feature)
    return rows

  def _find_inputs(
    self, stages: Mapping[int, StageProgram]
  ) -> dict[str, tf.Tensor]:
    """Returns a call's placeholders by name; `stages` is {pod: its stage}."""
    program = self.program
    inputs = {"step": program.step, "microbatch": program.microbatch}
    if program.batches is not None:  # feed no rows: servers read them
      return {**inputs, "batches": program.batches}
    for pod, stage in stages.items():
      inputs |= self._find_rows(pod, stage)
    return inputs

  def _make_inputs(
    self, program: Program, batch: Batch | str, step: int, microbatch: int
  ) -> dict[str, object]:
    values = {"step": step, "microbatch": microbatch, "batches": batch}
    num_parts = len(self.program.pods) * self.program.num_microbatches
    size = self.program.batch_size // num_parts
    for name in program.inputs.keys() - values.keys():
      pod, feature = self._rows[name]
      first = (pod * self.program.num_microbatches + microbatch) * size
      values[name] = batch[feature][first : first + size]
    return {name: values[name] for name in program.inputs}


def _to_floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
