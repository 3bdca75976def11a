# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuations are drawn from the model's distribution, and end in time.

The model here is a table of next-token logits: what sampling needs of one.
"""

import numpy as np
import pytest

from palm_mtf.data.vocabulary import Vocabulary
from palm_mtf.data.vocabulary_training import train_vocabulary
from palm_mtf.sampling import TEMPERATURE, continue_texts

SEQUENCE_LENGTH = 400


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
  path = str(tmp_path_factory.mktemp("vocabulary") / "vocabulary.model")
  train_vocabulary(["abcd " * 50, "a b c d\n" * 50], 280, path=path)
  return Vocabulary(path)


class Bigrams:
  """Gives the same next-token logits after every text."""

  sequence_length = SEQUENCE_LENGTH

  def __init__(self, logits, batch_size=1):
    self.logits, self.batch_size = logits, batch_size

  def next_logits(self, inputs, position):
    assert inputs.shape == (self.batch_size, SEQUENCE_LENGTH)
    is_known = np.all(inputs[:, 1 : position + 1], axis=1)
    assert is_known.any(), f"no text reaches place {position}"
    return np.tile(self.logits, [self.batch_size, 1]).astype(np.float32)


def logits_of(vocabulary, shares):
  logits = np.full(vocabulary.size, -1e9)
  for token, share in shares.items():
    logits[token] = TEMPERATURE * np.log(share)
  return logits


def test_tokens_are_drawn_with_the_softmax_shares(vocabulary):
  first, second = vocabulary.encode("a")[0], vocabulary.encode("b")[0]
  logits = logits_of(vocabulary, {first: 0.8, second: 0.2})
  (text,) = continue_texts(
    Bigrams(logits), vocabulary, ["a"], sample_tokens=390, seed=0
  )
  assert set(text) == {"a", "b"}
  # 390 draws: the share of b has a standard deviation of 0.02.
  assert text.count("b") / len(text) == pytest.approx(0.2, abs=0.08)


def test_eod_ends_one_text_and_leaves_the_others(vocabulary):
  token = vocabulary.encode("c")[0]
  logits = logits_of(vocabulary, {token: 0.9, vocabulary.eod_id: 0.1})
  texts = continue_texts(
    Bigrams(logits, batch_size=3),
    vocabulary,
    ["a", "b", "c"],
    sample_tokens=60,
    seed=1,
  )
  assert len({len(text) for text in texts}) > 1
  assert all(set(text) <= {"c"} for text in texts)


def test_longest_continuation_fills_the_sequence_exactly(vocabulary):
  token = vocabulary.encode("d")[0]
  logits = logits_of(vocabulary, {token: 1.0})
  prompt_tokens = len(vocabulary.encode("a"))
  (text,) = continue_texts(
    Bigrams(logits),
    vocabulary,
    ["a"],
    sample_tokens=SEQUENCE_LENGTH - prompt_tokens,
    seed=0,
  )
  assert text == "d" * (SEQUENCE_LENGTH - prompt_tokens)


def test_seed_and_prompt_key_the_draws(vocabulary):
  tokens = [vocabulary.encode(letter)[0] for letter in "abcd"]
  model = Bigrams(logits_of(vocabulary, dict.fromkeys(tokens, 0.25)))

  def text(prompt, seed):
    (text,) = continue_texts(
      model, vocabulary, [prompt], sample_tokens=50, seed=seed
    )
    return text

  assert text("a", 0) == text("a", 0)
  assert len({text("a", 0), text("a", 1), text("b", 0)}) == 3
