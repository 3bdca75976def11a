# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A training step in a session: its microbatches, the last with the update.

A step whose loss or gradients are infinite or no number changes no variable;
its last part is run again without the update, to say where that began.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.batches import Batch, split_batch
from palm_mtf.pods.program import TrainProgram


class BadStepError(Exception):
  """A step with a number that is not finite; it has changed no variable.

  Attributes:
    losses: loss, z_loss and grad_norm of the step.
    gradient_squares: [variables], float32, as in TrainProgram.
  """

  def __init__(self, losses: dict[str, float], gradient_squares: np.ndarray):
    """Keeps both."""
    super().__init__(losses)
    self.losses = losses
    self.gradient_squares = gradient_squares


class _Calls(NamedTuple):
  """Into a session: what the last microbatch of a step runs, and the others."""

  update: Callable[..., Any]
  accumulate: Callable[..., Any] | None = None


class TrainStep:
  """Runs the steps of a program, and its loss on other batches."""

  def __init__(self, session: tf.Session, program: TrainProgram):
    """Readies the calls into `session`, whose variables must be set."""
    self._num_pods = len(program.pods)
    self._num_microbatches = program.num_microbatches
    self._features = list(program.pods[0].features)
    features = [x for pod in program.pods for x in pod.features.values()]
    self._session, self._program = session, program
    self._fed = fed = [*features, program.step, program.microbatch]
    self._calls = self._made_callable()
    self._measure = session.make_callable(
      [program.losses, program.gradient_squares], fed
    )
    self._losses_and_weights = session.make_callable(
      [[pod.loss, pod.weight_sum] for pod in program.pods], features
    )

  def run(
    self,
    batch: Batch,
    step: int,
    records: list[tf.RunMetadata] | None = None,
  ) -> dict[str, float]:
    """Trains on a batch.

    Args:
      batch: the features of the program.
      step: steps done before this one.
      records: where to add what the runtime records of each microbatch, the
        time of each operation; None records nothing. It changes no bit.

    Returns:
      The metrics of the step, by name.

    Raises:
      BadStepError: its loss or its gradients are not finite.
    """
    calls = self._calls if records is None else self._recorded(records)
    *others, last = enumerate(self._microbatches(batch))
    for i, rows in others:
      calls.accumulate(*rows, step, i)
    i, rows = last
    try:
      metrics, _ = calls.update(*rows, step, i)
    except tf.errors.InvalidArgumentError:
      losses, squares = self._measure(*rows, step, i)
      if np.isfinite(list(losses.values())).all():
        raise  # something else was wrong
      raise BadStepError(_floats(losses), squares) from None
    return _floats(metrics)

  def mean_loss(self, batches: Iterable[Batch]) -> float:
    """Returns the nats of a target, averaged over all targets of `batches`."""
    results = [
      result
      for batch in batches
      for rows in self._microbatches(batch)
      for result in self._losses_and_weights(*rows)
    ]
    losses, weights = zip(*results, strict=True)
    return float(np.average(losses, weights=weights))

  def _made_callable(self, **options: bool) -> _Calls:
    """Returns the calls that change variables."""
    program = self._program
    # A callable returns what has the structure of its first argument.
    fetched = [[program.metrics, program.update]]
    if program.accumulate is not None:
      fetched.append(program.accumulate)
    return _Calls(
      *(self._session.make_callable(x, self._fed, **options) for x in fetched)
    )

  def _recorded(self, records: list[tf.RunMetadata]) -> _Calls:
    """Returns the same calls, each of which adds to `records`."""
    options = tf.RunOptions(trace_level=tf.RunOptions.FULL_TRACE)

    def recorded(call: Callable[..., Any]) -> Callable[..., Any]:
      def run(*fed: object) -> object:
        records.append(tf.RunMetadata())
        return call(*fed, options=options, run_metadata=records[-1])

      return run

    calls = self._made_callable(accept_options=True)
    return _Calls(*(call and recorded(call) for call in calls))

  def _microbatches(self, batch: Batch) -> Iterator[list[np.ndarray]]:
    """Yields what to feed for each microbatch, pod after pod."""
    shares = [
      split_batch(share, self._num_microbatches)
      for share in split_batch(batch, self._num_pods)
    ]
    for parts in zip(*shares, strict=True):
      yield [part[name] for part in parts for name in self._features]


def _floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
