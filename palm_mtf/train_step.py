# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A training step in a session: its microbatches, the last with the update."""

from collections.abc import Iterable, Iterator

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.data.batches import Batch, split_batch
from palm_mtf.pods.program import TrainProgram


class TrainStep:
  """Runs the steps of a program, and its loss on other batches."""

  def __init__(self, session: tf.Session, program: TrainProgram):
    """Readies the calls into `session`, whose variables must be set."""
    self._num_pods = len(program.pods)
    self._num_microbatches = program.num_microbatches
    self._features = list(program.pods[0].features)
    self._metrics = list(program.metrics)
    features = [x for pod in program.pods for x in pod.features.values()]
    fed = [*features, program.step, program.microbatch]
    self._step = session.make_callable(
      [*program.metrics.values(), program.gradient_squares, program.update], fed
    )
    if program.accumulate is not None:
      self._accumulate = session.make_callable(program.accumulate, fed)
    self._losses_and_weights = session.make_callable(
      [[pod.loss, pod.weight_sum] for pod in program.pods], features
    )

  def run(self, batch: Batch, step: int) -> tuple[dict[str, float], np.ndarray]:
    """Trains on a batch.

    Args:
      batch: the features of the program.
      step: steps done before this one.

    Returns:
      The metrics of the step, by name, and its gradient_squares.
    """
    *others, last = enumerate(self._microbatches(batch))
    for i, rows in others:
      self._accumulate(*rows, step, i)
    i, rows = last
    *values, squares, _ = self._step(*rows, step, i)
    metrics = dict(zip(self._metrics, map(float, values), strict=True))
    return metrics, squares

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
