# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Loss of a trained model on batches, in a session of its own."""

from collections.abc import Callable, Iterable, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import restore
from palm_mtf.config import MeshLayout, PalmConfig
from palm_mtf.data.batches.batches import Batch
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.features import REQUIRED_FEATURES
from palm_mtf.programs.forward_program import build_forward_program


class LoadedModel:
  """Weights of a checkpoint, as a context manager that closes its session."""

  def __init__(
    self,
    checkpoint: Checkpoint,
    model: PalmConfig,
    mesh: MeshLayout,
    *,
    batch_size: int,
    features: Sequence[str] = REQUIRED_FEATURES,
  ):
    # `features` are names of the features that every batch has.
    with tf.Graph().as_default():
      program = build_forward_program(
        model, mesh, batch_size=batch_size, features=features
      )
      # Weights alone are in memory: no gradients, and no moments.
      self._session = tf.Session(config=session_config(mesh.num_devices))
      restore(self._session, [program.slices], checkpoint.prefix)
    self._features = list(program.features)
    self._loss_and_weight = self._session.make_callable(
      [program.loss, program.weight_sum], list(program.features.values())
    )

  def __enter__(self) -> "LoadedModel":
    return self

  def __exit__(self, *unused: object) -> None:
    self._session.close()

  def losses(self, batch: Batch) -> list[tuple[float, float]]:
    """Returns the mean loss of a batch, and the weight that it is over."""
    fed = (batch[name] for name in self._features)
    return [self._loss_and_weight(*fed)]


def mean_loss(
  losses: Callable[[Batch], Iterable[tuple[float, float]]],
  batches: Iterable[Batch],
) -> float:
  """Returns -log p of a target in nats, averaged over all of `batches`.

  Args:
    losses: measures a batch: the loss of each of its parts, and its weight.
    batches: features that `losses` takes.
  """
  pairs = [pair for batch in batches for pair in losses(batch)]
  # A part counts by its loss weights: a mean of means would not.
  values, weights = zip(*pairs, strict=True)
  return float(np.average(values, weights=weights))
