# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A training step in a session: its microbatches, the last with the update.

A step whose loss or gradients are infinite or no number changes no variable;
its last part is run again without the update, to say where that began.
"""

from collections.abc import Iterable, Iterator

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


class TrainStep:
  """Runs the steps of a program, and its loss on other batches."""

  def __init__(self, session: tf.Session, program: TrainProgram):
    """Readies the calls into `session`, whose variables must be set."""
    self._num_pods = len(program.pods)
    self._num_microbatches = program.num_microbatches
    self._features = list(program.pods[0].features)
    features = [x for pod in program.pods for x in pod.features.values()]
    fed = [*features, program.step, program.microbatch]
    # A callable returns what has the structure of its first argument.
    self._step = session.make_callable([program.metrics, program.update], fed)
    self._measure = session.make_callable(
      [program.losses, program.gradient_squares], fed
    )
    if program.accumulate is not None:
      self._accumulate = session.make_callable(program.accumulate, fed)
    self._losses_and_weights = session.make_callable(
      [[pod.loss, pod.weight_sum] for pod in program.pods], features
    )

  def run(self, batch: Batch, step: int) -> dict[str, float]:
    """Trains on a batch.

    Args:
      batch: the features of the program.
      step: steps done before this one.

    Returns:
      The metrics of the step, by name.

    Raises:
      BadStepError: its loss or its gradients are not finite.
    """
    *others, last = enumerate(self._microbatches(batch))
    for i, rows in others:
      self._accumulate(*rows, step, i)
    i, rows = last
    try:
      metrics, _ = self._step(*rows, step, i)
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
