# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens are drawn with the probabilities that NumPy finds by sorting."""

import numpy as np
import pytest

from palm_mtf._tf import tf2
from palm_mtf.export.saved_model.text_model import Sampler

VOCAB, NUM_TOKENS, DRAWS = 12, 10, 4000
LOGITS = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32) * 2


def _draw(temperature=1.0, top_k=NUM_TOKENS, top_p=1.0, seed=0, place=0):
  sampler = Sampler(
    temperature=tf2.constant(temperature),
    top_k=tf2.constant(top_k),
    top_p=tf2.constant(top_p),
    seed=tf2.constant(seed),
    num_tokens=NUM_TOKENS,
  )
  rows = tf2.constant(np.tile(LOGITS, [DRAWS, 1]))
  return sampler.next_tokens(rows, tf2.constant(place)).numpy()


def _shares(temperature=1.0, top_k=NUM_TOKENS, top_p=1.0) -> np.ndarray:
  shares = np.exp(LOGITS[:NUM_TOKENS].astype(np.float64) / temperature)
  order = np.argsort(-shares)
  shares[order[top_k:]] = 0
  shares /= shares.sum()
  before = np.cumsum(shares[order]) - shares[order]
  shares[order[before >= top_p]] = 0
  return shares / shares.sum()


@pytest.mark.parametrize(
  "numbers",
  [
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_p": 0.6},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.8},
  ],
  ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_of_the_settings(numbers):
  found = np.bincount(_draw(**numbers), minlength=NUM_TOKENS) / DRAWS
  expected = _shares(**numbers)
  assert not found[expected == 0].any()
  np.testing.assert_allclose(found, expected, atol=0.03)


def test_a_temperature_of_zero_takes_the_likeliest_token():
  assert set(_draw(temperature=0.0)) == {np.argmax(LOGITS[:NUM_TOKENS])}


def test_a_draw_depends_only_on_seed_and_place():
  np.testing.assert_array_equal(_draw(seed=1, place=2), _draw(seed=1, place=2))
  assert (_draw(seed=1) != _draw(seed=2)).any()
  assert (_draw(place=1) != _draw(place=2)).any()
