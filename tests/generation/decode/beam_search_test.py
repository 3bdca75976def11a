# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A beam search that is wide enough finds the best of all texts.

The model here is a table: log p of a token after each token.
"""

import itertools

import numpy as np
import pytest

from palm_mtf._tf import tf
from palm_mtf.generation.decode.beam_search import BeamSearch

VOCAB, EOD, MAX_TOKENS = 4, 1, 4
PROMPTS = 3


def tables(seed):
  """Returns per prompt: logits [previous token, token], first logits."""
  rng = np.random.default_rng(seed)
  scaled = 2 * rng.normal(size=[PROMPTS, VOCAB + 1, VOCAB])
  return scaled.astype(np.float32)


def log_softmax(x):
  x = x.astype(np.float64)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def run_search(tables, num_beams, length_penalty):
  """Returns tokens [prompts, beams, max_tokens] and scores [prompts, beams]."""
  search = BeamSearch(
    num_beams=num_beams,
    length_penalty=length_penalty,
    max_tokens=MAX_TOKENS,
    eod_id=EOD,
    num_tokens=VOCAB,
  )
  with tf.Graph().as_default(), tf.Session() as session:
    state = search.first_state(PROMPTS)
    last = tf.fill([PROMPTS * num_beams], VOCAB)
    prompt = tf.repeat(tf.range(PROMPTS), num_beams)
    for place in range(MAX_TOKENS):
      logits = tf.gather_nd(tables, tf.stack([prompt, last], -1))
      state, last, _ = search.advance(state, logits, tf.constant(place))
    *_, scores, tokens = session.run(state)
  return tokens, scores


def score(table, text, length_penalty):
  log_p = log_softmax(table)
  total = sum(log_p[a, b] for a, b in itertools.pairwise([VOCAB, *text]))
  return total / ((5 + len(text)) / 6) ** length_penalty


def all_texts():
  """Yields every text that ends with [eod] or has MAX_TOKENS."""
  for length in range(1, MAX_TOKENS + 1):
    for text in itertools.product(range(VOCAB), repeat=length):
      if EOD not in text[:-1] and (text[-1] == EOD or length == MAX_TOKENS):
        yield text


@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_a_wide_search_finds_the_best_of_all_texts_in_order(
  seed, length_penalty
):
  models = tables(seed)
  width = 3 ** (MAX_TOKENS - 1)  # the number of prefixes
  tokens, scores = run_search(models, width, length_penalty)
  for prompt, table in enumerate(models):
    ranked = sorted(
      all_texts(), key=lambda t: score(table, t, length_penalty), reverse=True
    )
    for row in range(5):
      expected = [*ranked[row], *[EOD] * (MAX_TOKENS - len(ranked[row]))]
      assert tokens[prompt, row].tolist() == expected
      assert scores[prompt, row] == pytest.approx(
        score(table, ranked[row], length_penalty), rel=1e-5
      )


def beam_search(table, num_beams, length_penalty):
  """Runs a beam search in plain Python; returns its best texts."""
  living, ended = [()], []
  for length in range(1, MAX_TOKENS + 1):
    longer = [(*text, token) for text in living for token in range(VOCAB)]
    longer.sort(key=lambda text: score(table, text, 0.0), reverse=True)
    longer = longer[: 2 * num_beams]
    is_end = [t[-1] == EOD or length == MAX_TOKENS for t in longer]
    ended += [t for t, end in zip(longer, is_end, strict=True) if end]
    living = [t for t, end in zip(longer, is_end, strict=True) if not end]
    living = living[:num_beams]
  ended.sort(key=lambda text: score(table, text, length_penalty), reverse=True)
  return ended[:num_beams]


@pytest.mark.parametrize("num_beams", [1, 2, 3])
def test_a_narrow_search_keeps_the_beams_that_it_should(num_beams):
  models = tables(seed=2)
  tokens, _ = run_search(models, num_beams, 0.6)
  for prompt, table in enumerate(models):
    for row, text in enumerate(beam_search(table, num_beams, 0.6)):
      expected = [*text, *[EOD] * (MAX_TOKENS - len(text))]
      assert tokens[prompt, row].tolist() == expected
