# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The fast tokenizer gives the vocabulary's ids for any text."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece.sentencepiece_model_pb2 import ModelProto

from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.training import learn_model
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.export.huggingface.folder import (
  explain_inexact,
  make_tokenizer_json,
)
from tests.source_files import PACKAGE, text_of

tokenizers = pytest.importorskip("tokenizers")

# Source code, whose pieces have runs of spaces and repeated characters.
SOURCES = [text_of(path) for path in PACKAGE if text_of(path)][:60]


# Pieces that SentencePiece finds in a text before it merges others.
USER_DEFINED = ["\u2581" * 2, "\u2581" * 3, "\n", "\n\n", "<b>", "</b>", "def"]


@pytest.fixture(scope="module", params=[[], USER_DEFINED], ids=len)
def vocabulary(request, tmp_path_factory) -> Vocabulary:
  path = tmp_path_factory.mktemp("vocabulary") / "code.model"
  model = ModelProto.FromString(learn_model(SOURCES, 1500))
  known = {each.piece: each for each in model.pieces}
  for piece in request.param:
    (known.get(piece) or model.pieces.add(piece=piece)).type = 4
  path.write_bytes(model.SerializeToString())
  return open_vocabulary(str(path))


@pytest.fixture(scope="module")
def tokenizer(vocabulary):
  content = make_tokenizer_json(vocabulary, start_id=vocabulary.eod_id)
  return tokenizers.Tokenizer.from_str(json.dumps(content))


def _assert_same(vocabulary, tokenizer, text: str) -> None:
  ids = tokenizer.encode(text, add_special_tokens=False).ids
  assert ids == vocabulary.encode(text), repr(text)
  assert tokenizer.decode(ids) == text


def draw_texts(vocabulary):
  """Yields source code, pieces strung together, and repeated characters."""
  yield from SOURCES
  rng = random.Random(0)
  pieces = [vocabulary.piece(i) for i in range(vocabulary.size)]
  for number in range(500):
    text = "".join(rng.choices(pieces, k=rng.randrange(12)))
    yield text if number % 5 == 0 else text.replace("\u2581", " ")
    letters = rng.choices(" \n=-#.\"'etn0_", k=2)
    yield "".join(rng.choices(letters, k=rng.randrange(40)))
  # A text that names a special piece has the ids of its letters.
  yield from (
    "[eod]",
    "<pad>",
    "<unk>",
    "<0x41>",
    "a\u2581b",
    "\u2585",
    "\0",
    "",
  )


def test_ids_of_source_code_and_of_rare_texts_are_the_same(
  vocabulary, tokenizer
):
  for text in draw_texts(vocabulary):
    _assert_same(vocabulary, tokenizer, text)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_ids_of_any_text_are_the_same(vocabulary, tokenizer, text):
  _assert_same(vocabulary, tokenizer, text)


def test_what_the_model_reads_before_a_text_is_the_first_id(
  vocabulary, tokenizer
):
  assert tokenizer.encode("a").ids == [1, *vocabulary.encode("a")]


@pytest.mark.parametrize(
  "setting, reason",
  [
    ({"model_type": "unigram"}, "not a byte-pair encoding"),
    ({"normalization_rule_name": "nfkc"}, "normalizes text"),
    ({"add_dummy_prefix": True}, "adds or removes spaces"),
    ({"byte_fallback": False, "vocab_size": 100}, "no byte pieces"),
  ],
)
def test_a_vocabulary_that_encodes_differently_has_a_reason(
  tmp_path, setting, reason
):
  import sentencepiece

  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(SOURCES[3].splitlines()),
    model_prefix=str(tmp_path / "foreign"),
    **{
      "model_type": "bpe",
      "vocab_size": 400,
      "byte_fallback": True,
      "normalization_rule_name": "identity",
      "add_dummy_prefix": False,
      "remove_extra_whitespaces": False,
      "hard_vocab_limit": False,
      "minloglevel": 2,
      **setting,
    },
  )
  vocabulary = open_vocabulary(str(tmp_path / "foreign.model"))
  assert reason in explain_inexact(vocabulary)


def test_a_vocabulary_of_ours_is_exact(vocabulary):
  assert explain_inexact(vocabulary) == ""
