# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from palm_mtf.data.statistics import unigram_entropy


def test_equal_shares_have_the_entropy_of_their_number():
  tokens = np.tile(np.arange(10, 74, dtype=np.uint16), 5)
  assert unigram_entropy(tokens) == pytest.approx(np.log(64))


def test_one_token_alone_has_no_entropy():
  assert unigram_entropy(np.full(9, 7, np.uint32)) == 0.0
  assert unigram_entropy(np.empty(0, np.uint16)) == 0.0


def test_the_entropy_is_the_best_loss_without_context():
  random = np.random.default_rng(0)
  tokens = random.geometric(0.2, size=3_000_000).astype(np.uint16)
  share = np.bincount(tokens) / len(tokens)
  loss = np.mean(-np.log(share[tokens]))
  assert unigram_entropy(tokens) == pytest.approx(loss)
  # Of the distribution itself: H(p) / p, H the binary entropy.
  assert unigram_entropy(tokens) == pytest.approx(
    -(0.2 * np.log(0.2) + 0.8 * np.log(0.8)) / 0.2, rel=1e-3
  )
