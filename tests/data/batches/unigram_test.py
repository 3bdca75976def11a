# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from palm_mtf.data.batches.unigram import unigram_entropy


def batches(tokens, size=7, **features):
  """Cuts `tokens`, [n], into batches, as the validation batches come."""
  names = {"targets": tokens, **features}
  return (
    {name: values[i : i + size][None] for name, values in names.items()}
    for i in range(0, len(tokens), size)
  )


def test_one_token_alone_has_no_entropy():
  assert unigram_entropy(batches(np.full(9, 7, np.int32))) == 0.0
  assert unigram_entropy([]) == 0.0


def test_later_batches_may_have_higher_and_lower_tokens():
  tokens = np.array([3, 3, 900, 900, 5, 5, 3, 3], np.int32)
  shares = np.array([4, 2, 2]) / 8
  entropy = -(shares * np.log(shares)).sum()
  assert unigram_entropy(batches(tokens, 2)) == pytest.approx(entropy)
  assert unigram_entropy(batches(tokens, 8)) == pytest.approx(entropy)


def test_only_learnt_tokens_count():
  tokens = np.array([4, 4, 9, 9, 0, 0], np.int32)
  weights = np.array([1, 1, 1, 0, 0, 0], np.float32)
  shares = np.array([2, 1]) / 3
  entropy = unigram_entropy(batches(tokens, 4, loss_weights=weights))
  assert entropy == pytest.approx(-(shares * np.log(shares)).sum())


def test_the_entropy_is_the_best_loss_without_context():
  random = np.random.default_rng(0)
  tokens = random.geometric(0.2, size=3_000_000).astype(np.int32)
  share = np.bincount(tokens) / len(tokens)
  loss = np.mean(-np.log(share[tokens]))
  entropy = unigram_entropy(batches(tokens, 100_000))
  assert entropy == pytest.approx(loss)
  # Of the distribution itself: H(p) / p, H the binary entropy.
  assert entropy == pytest.approx(
    -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)) / 0.2, rel=1e-3
  )
