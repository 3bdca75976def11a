# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""What a model must beat: the entropy of tokens drawn one by one."""

import numpy as np

_BLOCK_TOKENS = 1 << 20  # bincount makes an int64 copy of what it counts


def unigram_entropy(tokens: np.ndarray) -> float:
  """Returns the entropy of the tokens' own distribution, in nats per token.

  No model that ignores context has a lower loss on `tokens`, [num_tokens], so
  a loss below it is learnt from context.
  """
  if not len(tokens):
    return 0.0
  counts = np.zeros(int(tokens.max()) + 1, np.int64)
  for start in range(0, len(tokens), _BLOCK_TOKENS):
    block = tokens[start : start + _BLOCK_TOKENS]
    counts += np.bincount(block, minlength=len(counts))
  shares = counts[counts > 0] / len(tokens)
  return float(-np.sum(shares * np.log(shares)))
