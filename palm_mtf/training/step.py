# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Runs the training steps of a session, microbatch by microbatch."""

import concurrent.futures
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.batches.batches import Batch, split_batch
from palm_mtf.mesh.session import ONE_BY_ONE
from palm_mtf.programs.train_program import TrainProgram

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
  """Runs a program's steps, and computes its losses on other batches."""

  def __init__(self, session: tf.Session, program: TrainProgram):
    """Makes callables of `session`, in which the variables are set."""
    self._program, self._num_pods = program, len(program.pods)
    numbers = [program.step, program.microbatch]
    self._num_microbatches = program.num_microbatches
    self._features = list(program.pods[0].features)
    # For each pod, placeholders of its features on all servers of the pod.
    by_pod = [
      [x for each in (pod.features, *pod.copies) for x in each.values()]
      for pod in program.pods
    ]
    every = [x for features in by_pod for x in features]
    # If servers read the rows of a step, only `losses` feeds rows.
    fed = [*([] if program.servers_read else every), *numbers]
    # Runs the last microbatch of all pods, the exchange of gradients and the
    # update. Returns the values of `metrics`, and None.
    self._update = session.make_callable(
      [program.metrics, program.update], fed, accept_options=True
    )
    # Earlier microbatches are separate calls for each pod, so that no pod waits
    # for another pod.
    self._accumulate = [
      session.make_callable(
        pod.accumulate,
        [*([] if program.servers_read else features), *numbers],
        accept_options=True,
      )
      for pod, features in zip(program.pods, by_pod, strict=True)
    ]
    self._is_first = True
    # Computes losses and gradients like `_update`, but updates nothing.
    self._measure = session.make_callable(
      [program.losses, program.gradient_squares, program.is_finite], fed
    )
    if loop := program.loop:
      self._run_loop = session.make_callable(
        [loop.metrics, loop.num_done, loop.is_finite],
        [*loop.features.values(), program.step, loop.num_steps],
      )
    self._clients = concurrent.futures.ThreadPoolExecutor(self._num_pods)
    self._losses_and_weights = session.make_callable(
      [[pod.loss, pod.weight_sum] for pod in program.pods], every
    )

  def run(
    self,
    batch: Batch | None,
    step: int,
    records: list[tf.RunMetadata] | None = None,
  ) -> dict[str, float]:
    """Trains on a batch; returns the metrics of the step, by name.

    Args:
      batch: arrays of the program's features; None if servers read the batch.
      step: number of steps done before.
      records: list to which the trace of each call is added; None to trace
        nothing.

    Raises:
      NonFiniteStepError: the loss or the gradients are not finite.
    """
    options = None
    if self._is_first and self._num_pods > 1:
      # This option, which servers ignore, makes pods of this process compile
      # one after another, so that later pods reuse the first pod's compiled
      # code.
      options = ONE_BY_ONE
    self._is_first = False

    def run(call: Callable[..., Any], *fed: object) -> Any:
      if records is None:
        return call(*fed, options=options)
      records.append(tf.RunMetadata())
      return call(*fed, options=_TRACED, run_metadata=records[-1])

    def accumulate(pod: int) -> None:
      for i, rows in enumerate(shares[pod][:-1]):
        run(self._accumulate[pod], *rows, step, i)

    shares = [[[]] * self._num_microbatches] * self._num_pods
    if batch:
      shares = self._split_batch(batch)
    list(self._clients.map(accumulate, range(self._num_pods)))
    # In this call pods wait for each other, to exchange gradients.
    last = self._feed_last(shares, step)
    try:
      metrics, _ = run(self._update, *last)
    except tf.errors.InvalidArgumentError:
      # The graph has refused the update. Compute the step again without the
      # update, to find out which numbers are not finite.
      losses, squares, is_finite = self._measure(*last)
      if is_finite:
        raise  # another error
      raise NonFiniteStepError(step + 1, _to_floats(losses), squares) from None
    return _to_floats(metrics)

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
    fed = []
    # Reshape [steps * rows, length] to [rounds, batch, length]; a round is one
    # microbatch of one step. Rounds after the last step are not run.
    for name, placeholder in self._program.loop.features.items():
      rows = np.concatenate([batch[name] for batch in batches])
      rounds = np.zeros(placeholder.shape, rows.dtype)
      rows = rows.reshape(-1, *rounds.shape[1:])
      rounds[: len(rows)] = rows
      fed.append(rounds)
    metrics, num_done, is_finite = self._run_loop(*fed, step, len(batches))
    done = [
      {name: float(by_step[i]) for name, by_step in metrics.items()}
      for i in range(num_done)
    ]
    if not is_finite:
      bad = num_done - 1
      last = self._feed_last(self._split_batch(batches[bad]), step + bad)
      losses, squares, _ = self._measure(*last)
      raise NonFiniteStepError(step + num_done, _to_floats(losses), squares)
    return done

  def losses(self, batch: Batch) -> Iterator[tuple[float, float]]:
    """Yields (mean loss, sum of loss weights) per pod and microbatch."""
    for parts in zip(*self._split_batch(batch), strict=True):
      rows = itertools.chain.from_iterable(
        part * (1 + len(pod.copies))
        for part, pod in zip(parts, self._program.pods, strict=True)
      )
      yield from self._losses_and_weights(*rows)

  def _feed_last(self, shares: list[list[list[np.ndarray]]], step: int) -> list:
    """Returns the feeds of `_update`, for the last microbatch of a step."""
    rows = [rows for share in shares for rows in share[-1]]
    return [*rows, step, self._num_microbatches - 1]

  def _split_batch(self, batch: Batch) -> list[list[list[np.ndarray]]]:
    """Returns a batch as [pods][microbatches][features] arrays of rows."""
    return [
      [
        [part[name] for name in self._features]
        for part in split_batch(share, self._num_microbatches)
      ]
      for share in split_batch(batch, self._num_pods)
    ]


def _to_floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
