# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A training step in a session: its microbatches, the last with the update.

A pod needs no other before the last microbatch, and waits for none: what comes
before it is a call of its own for each pod.

A step whose loss or gradients are infinite or no number changes no variable;
its last part is run again without the update, to say where that began.
"""

import concurrent.futures
import itertools
from collections.abc import Iterable, Sequence

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
    self._accumulate = [
      session.make_callable(
        pod.accumulate,
        [*pod.features.values(), program.step, program.microbatch],
      )
      for pod in program.pods
    ]
    self._clients = concurrent.futures.ThreadPoolExecutor(self._num_pods)
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
    shares = self._shares(batch)
    pods = [
      self._clients.submit(self._accumulate_share, pod, share[:-1], step)
      for pod, share in enumerate(shares)
    ]
    concurrent.futures.wait(pods)
    for pod in pods:
      pod.result()
    # A, the exchange and B: from here on pods wait for each other.
    last = [rows for share in shares for rows in share[-1]]
    last += [step, self._num_microbatches - 1]
    try:
      metrics, _ = self._step(*last)
    except tf.errors.InvalidArgumentError:
      losses, squares = self._measure(*last)
      if np.isfinite(list(losses.values())).all():
        raise  # something else was wrong
      raise BadStepError(_floats(losses), squares) from None
    return _floats(metrics)

  def mean_loss(self, batches: Iterable[Batch]) -> float:
    """Returns the nats of a target, averaged over all targets of `batches`."""
    results = []
    for batch in batches:
      for parts in zip(*self._shares(batch), strict=True):
        rows = itertools.chain.from_iterable(parts)
        results.extend(self._losses_and_weights(*rows))
    losses, weights = zip(*results, strict=True)
    return float(np.average(losses, weights=weights))

  def _accumulate_share(
    self, pod: int, microbatches: Sequence[list[np.ndarray]], step: int
  ) -> None:
    for i, rows in enumerate(microbatches):
      self._accumulate[pod](*rows, step, i)

  def _shares(self, batch: Batch) -> list[list[list[np.ndarray]]]:
    """Returns what to feed: of each pod, of each microbatch, its features."""
    return [
      [
        [part[name] for name in self._features]
        for part in split_batch(share, self._num_microbatches)
      ]
      for share in split_batch(batch, self._num_pods)
    ]


def _floats(values: dict[str, np.float32]) -> dict[str, float]:
  return {name: float(value) for name, value in values.items()}
