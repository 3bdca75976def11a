# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prints validation loss and calibration error of runs: give MODEL_DIRs.

A model is calibrated if, of all tokens that it predicts with probability p, the
share p is right. The expected calibration error (Guo et al. 2017, equation 3)
is the mean difference: |share of right predictions - mean probability| of the
tokens in 15 bins of equal width, weighted by their number of tokens.
"""

import sys

import numpy as np

from palm_mtf.checkpoints.weights_to_load import open_newest
from palm_mtf.cli.gin_files import load_run
from palm_mtf.data.batches.corpus import corpus_of_run
from palm_mtf.generation.decode.teacher_program import TeachRows
from palm_mtf.generation.inference.sessions import (
  LoadedDecoder,
  compute_mean_loss,
)

BINS = 15


def calibration_error(
  probabilities: np.ndarray, is_right: np.ndarray, weights: np.ndarray
) -> float:
  """Returns the error, from 0 to 1; arguments have one value per token.

  Args:
    probabilities: of the likeliest token.
    is_right: whether the text continues with that token.
    weights: weight of the token in the loss.
  """
  bins = np.minimum((probabilities * BINS).astype(int), BINS - 1)
  gaps = np.bincount(bins, weights * (is_right - probabilities), BINS)
  return float(np.abs(gaps).sum() / weights.sum())


def measure(model_dir: str) -> tuple[float, float]:
  """Returns validation loss and calibration error of the newest checkpoint."""
  model_dir, config = load_run("evaluate", model_dir, {})
  checkpoint, vocabulary = open_newest(model_dir, config)
  corpus = corpus_of_run(model_dir, config, vocabulary)
  model, mesh = config.model, config.mesh_layout
  size = config.run.batch_sizes.sizes[0]
  batches = list(
    corpus.validation_batches(
      batch_size=size, num_rows=config.run.num_validation_rows
    )
  )
  loss = compute_mean_loss(checkpoint, model, mesh, batches)
  found = []
  with LoadedDecoder(checkpoint, model, mesh) as loaded:
    likeliest = TeachRows(size, model.sequence_length, "top", 1, 1.0)
    program = loaded.build(likeliest, "")
    for batch in batches:
      ones = np.ones_like(batch["targets"])
      given = {"segments": ones} | batch | {"uniform": np.float32(0 * ones)}
      outputs = loaded.client.call(
        program, {name: given[name] for name in program.inputs}
      )
      ids, log_p = outputs["teacher_ids"], outputs["teacher_log_p"]
      weights = batch.get("loss_weights", ones)
      columns = np.exp(log_p[..., 0]), ids[..., 0] == batch["targets"], weights
      found.append([np.ravel(x) for x in columns])
  return loss, calibration_error(*np.concatenate(found, axis=1))


if __name__ == "__main__":
  for folder in sys.argv[1:]:
    loss, error = measure(folder)
    print(f"{folder}: {loss:.4f} nats per token, calibration error {error:.4f}")
