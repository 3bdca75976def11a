# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens are drawn with the probabilities that NumPy finds by sorting."""

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.config import DecodeConfig
from palm_mtf.generation.decode.sampling import (
  SamplingSettings,
  choose_tokens,
  forbid_tokens,
)

VOCAB, NUM_TOKENS, DRAWS = 12, 10, 4000
LOGITS = np.random.default_rng(5).normal(size=VOCAB).astype(np.float32) * 2


def draw(logits, config, *, keys=None, place=0, seen=None, mask=None):
  """Returns a token for each row of `logits`, [rows, vocab]."""
  rows = len(logits)
  if keys is None:
    keys = np.stack([np.arange(rows), np.zeros(rows)], 1)
  if seen is None:
    seen = np.zeros([rows, VOCAB], bool)
  limits = config.temperature, config.top_k, config.top_p
  settings = SamplingSettings(*limits, config.repetition_penalty)
  with tf.Graph().as_default(), tf.Session() as session:
    logits = tf.constant(logits)
    if mask is not None:
      logits = forbid_tokens(logits, tf.constant(mask))
    given = map(tf.constant, (seen, np.asarray(keys, np.int32), place))
    return session.run(choose_tokens(logits, *given, settings, NUM_TOKENS))


def expected_shares(config, seen=(), forbidden=()):
  """Returns the probability of each token, by sorting."""
  logits = LOGITS[:NUM_TOKENS].astype(np.float64)
  logits[list(forbidden)] = -np.inf
  for token in seen:
    penalty = config.repetition_penalty
    logits[token] *= penalty if logits[token] < 0 else 1 / penalty
  shares = np.exp(logits / config.temperature)
  order = np.argsort(-shares)
  shares[order[config.top_k or NUM_TOKENS :]] = 0
  shares /= shares.sum()
  before = np.cumsum(shares[order]) - shares[order]
  shares[order[before >= config.top_p]] = 0
  return shares / shares.sum()


@pytest.mark.parametrize(
  ("changes", "seen"),
  [
    ({}, []),
    ({"top_k": 3}, []),
    ({"top_p": 0.8}, []),
    ({"top_k": 6, "top_p": 0.7, "temperature": 1.5}, []),
    ({"repetition_penalty": 1.5}, [0, 3, 7]),
  ],
)
def test_tokens_are_drawn_with_their_probabilities(changes, seen):
  config = DecodeConfig(**{"temperature": 1.0, **changes})
  has = np.zeros([DRAWS, VOCAB], bool)
  has[:, seen] = True
  tokens = draw(np.tile(LOGITS, [DRAWS, 1]), config, seen=has)
  check_shares(tokens, expected_shares(config, seen))


def check_shares(tokens, shares):
  counts = np.bincount(tokens, minlength=NUM_TOKENS)
  assert not counts[shares == 0].any()
  # Four standard deviations of each count, plus 2 for the rarest tokens.
  deviation = np.sqrt(DRAWS * shares * (1 - shares))
  assert (np.abs(counts - DRAWS * shares) <= 4 * deviation + 2).all()


@pytest.mark.parametrize("changes", [{}, {"top_k": 3}, {"top_p": 0.8}])
def test_a_mask_acts_before_temperature_top_k_and_top_p(changes):
  """The likeliest token is forbidden, and the limits count without it."""
  config = DecodeConfig(**{"temperature": 1.5, **changes})
  forbidden = {int(LOGITS[:NUM_TOKENS].argmax()), 0}
  bits = sum(1 << i for i in range(NUM_TOKENS) if i not in forbidden)
  mask = np.full([DRAWS, 1], bits, np.int32)
  tokens = draw(np.tile(LOGITS, [DRAWS, 1]), config, mask=mask)
  check_shares(tokens, expected_shares(config, forbidden=forbidden))


def test_a_temperature_of_0_takes_the_likeliest_and_so_does_a_top_k_of_1():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=[20, VOCAB]).astype(np.float32)
  expected = logits[:, :NUM_TOKENS].argmax(1)
  for changes in ({"temperature": 0.0}, {"top_k": 1}, {"top_p": 1e-6}):
    tokens = draw(logits, DecodeConfig(**changes))
    np.testing.assert_array_equal(tokens, expected)


def test_ids_without_a_piece_are_never_drawn():
  logits = np.zeros([DRAWS, VOCAB], np.float32)
  logits[:, NUM_TOKENS:] = 50
  for temperature in (0.0, 1.0):
    tokens = draw(logits, DecodeConfig(temperature=temperature))
    assert tokens.max() < NUM_TOKENS


def test_tokens_that_tie_with_the_last_kept_token_are_kept():
  logits = np.zeros([DRAWS, VOCAB], np.float32)
  tokens = draw(logits, DecodeConfig(top_k=2))
  assert set(tokens) == set(range(NUM_TOKENS))


def test_a_draw_depends_on_key_and_place_and_not_on_other_rows():
  config = DecodeConfig(temperature=1.0)
  logits = np.zeros([64, VOCAB], np.float32)
  keys = np.random.default_rng(1).integers(-(2**31), 2**31, size=[64, 2])
  rows = [keys, keys[::-1], keys + 1]
  found = draw(np.tile(logits, [3, 1]), config, keys=np.concatenate(rows))
  together, reverse, others = np.split(found, 3)
  np.testing.assert_array_equal(reverse[::-1], together)
  assert draw(logits[:1], config, keys=keys[7:8])[0] == together[7]
  # A tenth of the tokens is the same by chance.
  assert np.mean(draw(logits, config, keys=keys, place=1) == together) < 0.4
  assert np.mean(others == together) < 0.4
