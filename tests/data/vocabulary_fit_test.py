# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest
import sentencepiece

from palm_mtf.commands.vocab import (
  count_pieces,
  measure_fit,
)
from palm_mtf.data.vocabulary.load import open_vocabulary
from tests.prefixed_vocabulary import train_prefixed

LOSSLESS = {
  "model_type": "bpe",
  "normalization_rule_name": "identity",
  "add_dummy_prefix": False,
  "remove_extra_whitespaces": False,
  "split_digits": True,
}


@pytest.fixture
def lossless(foreign):
  """Trains a model that is lossless except for `settings`."""
  return lambda **settings: open_vocabulary(foreign(**LOSSLESS | settings))


@pytest.mark.parametrize("joined", [False, True])
def test_pieces_that_join_digits_are_found(foreign, joined):
  path = foreign(model_type="bpe", split_digits=not joined)
  pieces = count_pieces(open_vocabulary(path))
  assert (pieces.joined_digits > 0) == joined
  assert any(c.isdigit() for c in pieces.first_joined_digits) == joined


@pytest.mark.parametrize(
  ("settings", "lost"),
  [
    ({}, []),
    ({"remove_extra_whitespaces": True}, ["runs of spaces"]),
    ({"normalization_rule_name": "nfkc"}, ["compatibility characters"]),
    (
      {"normalization_rule_name": "nmt_nfkc"},
      ["tabs", "line ends", "control characters"],
    ),
  ],
  ids=str,
)
def test_what_a_foreign_model_changes_is_named(lossless, settings, lost):
  losses = set(lossless(**settings).losses())
  assert losses >= set(lost)
  assert bool(losses) == bool(settings)


def test_fit_is_counted_as_sentencepiece_itself_encodes(vocabulary):
  texts = ["import os\n", "\U0001f600 = 2026\n", "", "import os\n"] * 500
  fit = measure_fit(vocabulary, iter(texts))
  processor = sentencepiece.SentencePieceProcessor(model_file=vocabulary.path)
  ids = list(itertools.chain(*processor.Encode(texts)))
  assert fit.num_documents == 2000
  assert fit.num_bytes == sum(len(text.encode()) for text in texts)
  assert fit.num_tokens == len(ids)
  assert fit.num_used == len(set(ids))
  assert fit.byte_share == sum(map(processor.IsByte, ids)) / len(ids)
  assert fit.byte_share == vocabulary.byte_share(ids)
  assert fit.tokens_per_byte == len(ids) / fit.num_bytes
  assert fit.bytes_per_token == fit.num_bytes / len(ids)
  assert (fit.num_changed, fit.first_change) == (0, "")


def test_long_texts_of_a_vocabulary_with_a_prefix_are_whole_again(tmp_path):
  prefixed = train_prefixed("one two", tmp_path)
  fit = measure_fit(prefixed, ["one two\n" * 20_000])
  assert (fit.num_documents, fit.num_changed) == (1, 0)


def test_no_text_has_no_tokens_and_no_division_by_zero(vocabulary):
  fit = measure_fit(vocabulary, [])
  assert (fit.num_tokens, fit.byte_share, fit.bytes_per_token) == (0, 0.0, 0.0)
  assert vocabulary.byte_share([]) == 0.0


def test_the_first_text_that_changes_is_shown(lossless):
  vocabulary = lossless(remove_extra_whitespaces=True)
  fit = measure_fit(vocabulary, ["a b", "some  words", "c  d"])
  assert fit.num_changed == 2
  assert fit.first_change == "document 2: 'some  words' becomes 'some words'"
