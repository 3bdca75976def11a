# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""One training step in a session: its microbatches, then its update."""

from collections.abc import Iterable

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.batches import Batch, split_batch
from palm_mtf.pods.program import TrainProgram


class TrainStep:
  """Runs the steps of a program, and its loss on other batches."""

  def __init__(self, session: tf.Session, program: TrainProgram):
    """Readies the calls into `session`, whose variables must be set."""
    self._num_parts = program.num_microbatches
    self._features = list(program.features)
    self._metrics = list(program.metrics)
    features = list(program.features.values())
    update = [
      *program.metrics.values(),
      program.gradient_squares,
      program.update,
    ]
    if program.accumulate is None:
      self._step = session.make_callable(update, [*features, program.step])
    else:
      self._accumulate = session.make_callable(
        program.accumulate, [*features, program.step, program.microbatch]
      )
      self._step = session.make_callable(update, [program.step])
    self._loss_and_weight = session.make_callable(
      [program.loss, program.weight_sum], features
    )

  def run(self, batch: Batch, step: int) -> tuple[dict[str, float], np.ndarray]:
    """Trains on a batch.

    Args:
      batch: the features of the program.
      step: steps done before this one.

    Returns:
      The metrics of the step, by name, and its gradient_squares.
    """
    if self._num_parts == 1:
      *values, squares, _ = self._step(*self._rows(batch), step)
    else:
      for i, part in enumerate(split_batch(batch, self._num_parts)):
        self._accumulate(*self._rows(part), step, i)
      *values, squares, _ = self._step(step)
    metrics = dict(zip(self._metrics, map(float, values), strict=True))
    return metrics, squares

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
