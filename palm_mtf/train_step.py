# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One training step in a session: its microbatches, then its update.

A step whose loss or gradients are infinite or no number changes no variable;
it is run again without its update, to say where that began.
"""

from collections.abc import Iterable

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
    self._num_parts = program.num_microbatches
    self._features = list(program.features)
    features = list(program.features.values())
    fed = [*features, program.step]
    if program.accumulate is not None:
      self._accumulate = session.make_callable(
        program.accumulate, [*fed, program.microbatch]
      )
      fed = [program.step]
    # A callable returns what has the structure of its first argument.
    self._step = session.make_callable([program.metrics, program.update], fed)
    self._measure = session.make_callable(
      [program.losses, program.gradient_squares], fed
    )
    self._loss_and_weight = session.make_callable(
      [program.loss, program.weight_sum], features
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
    if self._num_parts == 1:
      fed = [*self._rows(batch), step]
    else:
      for i, part in enumerate(split_batch(batch, self._num_parts)):
        self._accumulate(*self._rows(part), step, i)
      fed = [step]
    try:
      metrics, _ = self._step(*fed)
    except tf.errors.InvalidArgumentError:
      losses, squares = self._measure(*fed)
      if np.isfinite(list(losses.values())).all():
        raise  # something else was wrong
      raise BadStepError(_floats(losses), squares) from None
    return _floats(metrics)

  def mean_loss(self, batches: Iterable[Batch]) -> float:
    """Returns the nats of a target, averaged over all targets of `batches`."""
    results = [
      self._loss_and_weight(*self._rows(part))
      for batch in batches
      for part in split_batch(batch, self._num_parts)
    ]
    losses, weights = zip(*results, strict=True)
    return float(np.average(losses, weights=weights))

  def _rows(self, batch: Batch) -> list[np.ndarray]:
    return [batch[name] for name in self._features]


def _floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
