# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model must beat: the entropy of tokens drawn one by one."""

from collections.abc import Iterable

import numpy as np

from palm_mtf.data.batches.batches import Batch


def unigram_entropy(batches: Iterable[Batch]) -> float:
  """Returns the entropy of the learnt tokens' own distribution, nats per token.

  No model that ignores context has a lower loss on the targets of `batches`, so
  a loss below it is learnt from context.
  """
  counts = np.zeros(0, np.int64)
  for batch in batches:
    learnt = batch["targets"]
    if "loss_weights" in batch:
      learnt = learnt[batch["loss_weights"] > 0]
    new = np.bincount(learnt.ravel(), minlength=len(counts))
    new[: len(counts)] += counts
    counts = new
  shares = counts[counts > 0] / max(1, counts.sum())
  return float(-np.sum(shares * np.log(shares)))
