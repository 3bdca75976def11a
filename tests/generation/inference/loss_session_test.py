# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The loss of a checkpoint over batches whose targets are not equally many."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.checkpoints.manifest import Checkpoint
from palm_mtf.checkpoints.variables import WeightsCopier
from palm_mtf.generation.inference.loss_session import LoadedModel, mean_loss
from palm_mtf.programs.forward_program import build_forward_program
from tests import oracle
from tests.mtf_testing import (
  SINGLE,
  load_parameters,
  random_documents,
  small_config,
)


def save(config, params, folder) -> Checkpoint:
  """Writes `params` as the weights of a checkpoint."""
  checkpoint = Checkpoint(str(folder), manifest=None, files={}, blake2b="")
  with tf.Graph().as_default(), tf.Session() as session:
    program = build_forward_program(config, SINGLE, batch_size=2)
    load_parameters(session, program.slices, params)
    WeightsCopier(session, [program.slices]).copy()(checkpoint.prefix)
  return checkpoint


def test_mean_loss_is_the_total_of_all_batches_over_their_weight(
  tmp_path,
):
  config = small_config()
  params = oracle.random_parameters(config, seed=1)
  batches = [random_documents(config, batch_size=2, seed=s) for s in (2, 3)]
  batches[0]["loss_weights"][:, 1:] = 0
  with LoadedModel(
    save(config, params, tmp_path),
    config,
    SINGLE,
    batch_size=2,
    features=list(batches[0]),
  ) as loaded:
    mean = mean_loss(loaded.losses, batches)
  both = {
    name: np.concatenate([batch[name] for batch in batches])
    for name in batches[0]
  }
  exact, _ = oracle.loss(config, params, **both, z_loss=0.0)
  assert mean == pytest.approx(exact, rel=1e-6)
  losses = [oracle.loss(config, params, **b, z_loss=0.0)[0] for b in batches]
  assert np.mean(losses) != pytest.approx(exact, rel=1e-3)
