# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The unigram entropy: the loss that a model without context cannot beat."""

from collections.abc import Iterable

import numpy as np

from palm_mtf.data.batches.batches import Batch


def unigram_entropy(batches: Iterable[Batch]) -> float:
  """Returns the entropy of the distribution of learnt tokens, in nats."""
  # Of all distributions that ignore context, that of the tokens has the lowest
  # loss on them: a model with a lower loss has learnt from context.
  counts = np.zeros(0, np.int64)
  for batch in batches:
    learnt = batch["targets"]
    if "loss_weights" in batch:
      learnt = learnt[batch["loss_weights"] > 0]
    # A later batch may hold higher tokens than all before.
    new = np.bincount(learnt.ravel(), minlength=len(counts))
    new[: len(counts)] += counts
    counts = new
  shares = counts[counts > 0] / max(1, counts.sum())
  return float(-np.sum(shares * np.log(shares)))
