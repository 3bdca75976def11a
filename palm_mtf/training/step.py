# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the training steps of a session, microbatch by microbatch."""

from collections.abc import Iterator, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.batches.batches import Batch, split_batch
from palm_mtf.mesh.session import ONE_BY_ONE
from palm_mtf.programs.train_program import TrainProgram
from palm_mtf.runtime.client.client import Client
from palm_mtf.runtime.program import VARIABLES, Program

_TRACED = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)


class NonFiniteStepError(Exception):
  """A step's loss or gradients are not finite; the step changed no variable."""

  def __init__(
    self, step: int, losses: dict[str, float], gradient_squares: np.ndarray
  ):
    super().__init__(step, losses)
    self.step = step  # counted from 1
    self.losses = losses  # TrainProgram.losses
    self.gradient_squares = gradient_squares  # [parameters], float32


class TrainStep:
  """Runs a program's steps, and computes its losses on other batches.

  Attributes:
    program: graph of a step.
  """

  def __init__(self, client: Client, program: TrainProgram):
    """Makes the programs of a step.

    Args:
      client: client in whose graph `program` was built.
      program: training program.
    """
    self._client, self.program = client, program
    self._num_pods = len(program.pods)
    self._num_microbatches = program.num_microbatches
    numbers = {"step": program.step, "microbatch": program.microbatch}
    # For each pod: {name of an input: (feature, placeholder)}, with an input
    # for each server of the pod.
    self._features = [
      {
        f"pod_{i}/copy_{k}/{feature}": (feature, placeholder)
        for k, copy in enumerate((pod.features, *pod.copies))
        for feature, placeholder in copy.items()
      }
      for i, pod in enumerate(program.pods)
    ]
    pods = [
      {name: x for name, (_, x) in each.items()} for each in self._features
    ]
    every = {name: x for features in pods for name, x in features.items()}
    # If servers read the rows of a step, only the method `losses` feeds rows.
    servers_read = program.batches is not None
    if servers_read:
      numbers["batches"] = program.batches
    fed = {**({} if servers_read else every), **numbers}
    # Each pod's sums over microbatches are separate state, so that pods do
    # not wait for each other.
    sums = [frozenset([f"sums of pod {i}"]) for i in range(self._num_pods)]
    all_sums = frozenset().union(*sums)
    # Runs the last microbatch of all pods, the exchange of gradients and the
    # update.
    self._update = Program(
      inputs=fed,
      outputs=program.metrics,
      operations=[program.update],
      reads=all_sums,
      writes=VARIABLES,
    )
    # Earlier microbatches are separate calls for each pod, so that no pod waits
    # for another pod.
    self._accumulate = [
      Program(
        inputs={**({} if servers_read else features), **numbers},
        operations=[pod.accumulate],
        reads=VARIABLES,
        writes=own,
        device_bytes=dict.fromkeys(devices, 0),
      )
      for pod, features, own, devices in zip(
        program.pods, pods, sums, program.devices.pods, strict=True
      )
    ]
    self._is_first = True
    # Computes losses and gradients like `_update`, but updates nothing.
    self._measure = Program(
      inputs=fed,
      outputs=[program.losses, program.gradient_squares, program.is_finite],
      reads=VARIABLES | all_sums,
    )
    if loop := program.loop:
      self._run_loop = Program(
        inputs={
          **loop.features,
          "step": program.step,
          "num_steps": loop.num_steps,
        },
        outputs=[loop.metrics, loop.num_done, loop.is_finite],
        writes=VARIABLES | all_sums,
      )
    self._losses_and_weights = Program(
      inputs=every,
      outputs=[[pod.loss, pod.weight_sum] for pod in program.pods],
      reads=VARIABLES,
    )

  def run(
    self,
    batch: Batch | str,
    step: int,
    records: list[tf.RunMetadata] | None = None,
  ) -> dict[str, float]:
    """Trains on a batch; returns the metrics of the step, by name.

    Args:
      batch: arrays of the program's features; if servers read the batches, the
        text that describes the batches.
      step: number of steps done before.
      records: list to which the trace of each call is added; None to trace
        nothing.

    Raises:
      NonFiniteStepError: the loss or the gradients are not finite.
    """
    options = None
    if records is not None:
      options = _TRACED
    elif self._is_first and self._num_pods > 1:
      # With this option, which servers ignore, pods of this process compile one
      # after another, so that later pods reuse the first pod's compiled code.
      options = ONE_BY_ONE
    self._is_first = False

    def more() -> dict[str, object]:
      record = None
      if records is not None:
        record = tf.RunMetadata()
        records.append(record)
      return {"options": options, "run_metadata": record}

    last = self._num_microbatches - 1
    for i in range(last):
      for pod, accumulate in enumerate(self._accumulate):
        inputs = self._inputs(batch, step, i, [pod])
        self._client.run(accumulate, inputs, **more())
    # In this call pods wait for each other, to exchange gradients.
    inputs = self._inputs(batch, step, last)
    try:
      return _to_floats(self._client.call(self._update, inputs, **more()))
    except tf.errors.InvalidArgumentError:
      # The graph has refused the update. Compute the step again without the
      # update, to find out which numbers are not finite.
      losses, squares, is_finite = self._client.call(self._measure, inputs)
      if is_finite:
        raise  # another error
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
    # Reshape [steps * rows, length] to [rounds, ...], the shape of the features
    # of LoopProgram. Rounds after the last step stay zero, and are not run.
    for name, placeholder in self.program.loop.features.items():
      rows = np.concatenate([batch[name] for batch in batches])
      rounds = np.zeros(placeholder.shape, rows.dtype)
      rows = rows.reshape(-1, *rounds.shape[1:])
      rounds[: len(rows)] = rows
      fed[name] = rounds
    metrics, num_done, is_finite = self._client.call(self._run_loop, fed)
    done = [
      {name: float(by_step[i]) for name, by_step in metrics.items()}
      for i in range(num_done)
    ]
    if not is_finite:
      bad = num_done - 1
      last = self._inputs(batches[bad], step + bad, self._num_microbatches - 1)
      losses, squares, _ = self._client.call(self._measure, last)
      raise NonFiniteStepError(step + num_done, _to_floats(losses), squares)
    return done

  def losses(self, batch: Batch) -> Iterator[tuple[float, float]]:
    """Yields (mean loss, sum of loss weights) per pod and microbatch."""
    for i in range(self._num_microbatches):
      rows = self._rows(batch, i, range(self._num_pods))
      yield from self._client.call(self._losses_and_weights, rows)

  def _inputs(
    self,
    batch: Batch | str,
    step: int,
    microbatch: int,
    pods: Sequence[int] | None = None,
  ) -> dict[str, object]:
    """Returns the inputs of a microbatch of some pods (None: of all pods)."""
    inputs: dict[str, object] = {"step": step, "microbatch": microbatch}
    if isinstance(batch, str):
      return {**inputs, "batches": batch}
    pods = range(self._num_pods) if pods is None else pods
    return {**inputs, **self._rows(batch, microbatch, pods)}

  def _rows(
    self, batch: Batch, microbatch: int, pods: Sequence[int]
  ) -> dict[str, np.ndarray]:
    """Returns the inputs that are rows of a microbatch of some pods."""
    rows = {}
    shares = split_batch(batch, self._num_pods)
    for pod in pods:
      parts = split_batch(shares[pod], self._num_microbatches)
      for name, (feature, _) in self._features[pod].items():
        rows[name] = parts[microbatch][feature]
    return rows


def _to_floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
