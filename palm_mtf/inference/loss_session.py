# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A trained model in a session: its loss on batches.

commands/evaluate.py is its user; training/loop.py and generator.py have
sessions of their own.
"""

from collections.abc import Iterable, Sequence

import numpy as np

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.tensors import restore
from palm_mtf.config.mesh_layout import MeshLayout
from palm_mtf.config.model import PalmConfig
from palm_mtf.data.batches.batches import Batch
from palm_mtf.mesh.session import session_config
from palm_mtf.programs.features import REQUIRED_FEATURES
from palm_mtf.programs.forward_program import build_forward_program


class LoadedModel:
  """The weights of one checkpoint, for batches of one size.

  Use it as a context manager: it holds a session.
  """

  def __init__(
    self,
    checkpoint: Checkpoint,
    model: PalmConfig,
    mesh: MeshLayout,
    *,
    batch_size: int,
    features: Sequence[str] = REQUIRED_FEATURES,
  ):
    """Builds the forward pass for `batch_size` sequences and restores.

    Args:
      checkpoint: the weights.
      model: the architecture.
      mesh: devices and layout rules.
      batch_size: sequences in a batch.
      features: names among FEATURE_DTYPES: what every batch has.
    """
    with tf.Graph().as_default():
      program = build_forward_program(
        model, mesh, batch_size=batch_size, features=features
      )
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

  def mean_loss(self, batches: Iterable[Batch]) -> float:
    """Returns -log p of a target, averaged over all targets of `batches`."""
    results = [
      self._loss_and_weight(*(batch[name] for name in self._features))
      for batch in batches
    ]
    losses, weights = zip(*results, strict=True)
    return float(np.average(losses, weights=weights))
