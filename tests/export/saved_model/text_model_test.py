# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Tokens are drawn with the probabilities that NumPy finds by sorting.

The graph gives the vocabulary's ids and texts, for any text.
"""

import random

import numpy as np
import pytest
import sentencepiece

from palm_mtf._tf import tf2
from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.load import open_vocabulary
from palm_mtf.data.vocabulary.text_reader import decode_after
from palm_mtf.data.vocabulary.training import learn_model
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.export.saved_model.text_model import Sampler, TextCoder
from tests.generation.decode.sampling_test import (
  DRAWS,
  LOGITS,
  NUM_TOKENS,
  expected_shares,
)
from tests.prefixed_vocabulary import train_prefixed
from tests.source_files import PACKAGE, text_of


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


@pytest.mark.parametrize(
  "numbers",
  [
    {},
    {"top_k": 3},
    {"top_p": 0.6},
    {"temperature": 2.0, "top_k": 5, "top_p": 0.8},
  ],
  ids=str,
)
def test_tokens_are_drawn_with_the_probabilities_of_the_settings(numbers):
  found = np.bincount(_draw(**numbers), minlength=NUM_TOKENS) / DRAWS
  config = DecodeConfig(**{"temperature": 1.0, **numbers})
  expected = expected_shares(config)
  assert not found[expected == 0].any()
  np.testing.assert_allclose(found, expected, atol=0.03)


def test_a_temperature_of_zero_takes_the_likeliest_token():
  assert set(_draw(temperature=0.0)) == {np.argmax(LOGITS[:NUM_TOKENS])}


def test_a_draw_depends_only_on_seed_and_place():
  np.testing.assert_array_equal(_draw(seed=1, place=2), _draw(seed=1, place=2))
  assert (_draw(seed=1) != _draw(seed=2)).any()
  assert (_draw(place=1) != _draw(place=2)).any()


SOURCES = [text_of(path) for path in PACKAGE if text_of(path)][:40]


@pytest.fixture(scope="module", params=["ours", "with a prefix"])
def vocabulary(request, tmp_path_factory) -> Vocabulary:
  if request.param != "ours":
    folder = tmp_path_factory.mktemp("prefixed")
    return train_prefixed("import re\nimport json\nthe a the", folder)
  path = tmp_path_factory.mktemp("vocabulary") / "code.model"
  path.write_bytes(learn_model(SOURCES, 1500))
  return open_vocabulary(str(path))


@pytest.fixture(scope="module")
def coder(vocabulary) -> TextCoder:
  return TextCoder(vocabulary)


def _assert_same(vocabulary, coder, texts) -> None:
  ids = coder.encode(tf2.constant(texts))
  assert ids.to_list() == vocabulary.encode_batch(texts)
  decoded = coder.decode(ids).numpy()
  assert [each.decode() for each in decoded] == texts


def test_ids_of_a_vocabulary_without_byte_pieces_are_the_same(tmp_path):
  """Like T5's: unknown characters are lost, and sentinels have ids."""
  sentencepiece.SentencePieceTrainer.Train(
    sentence_iterator=iter(SOURCES[3].splitlines()),
    model_prefix=str(tmp_path / "t5"),
    vocab_size=300,
    hard_vocab_limit=False,
    minloglevel=2,
  )
  vocabulary = open_vocabulary(str(tmp_path / "t5.model"), extra_ids=10)
  texts = ["import re", "a <extra_id_0> b", "x\u2581y \u4e2d  ~\n", ""]
  ids = TextCoder(vocabulary).encode(tf2.constant(texts))
  assert ids.to_list() == vocabulary.encode_batch(texts)
  assert vocabulary.size - 1 in ids.to_list()[1]


def test_source_code_comes_back_from_its_ids(vocabulary, coder):
  _assert_same(vocabulary, coder, SOURCES)


def test_ids_of_any_characters_are_the_same(vocabulary, coder):
  rng = random.Random(0)
  letters = [" ", "  ", "\n", "\t", "a", "the", "\u2581", "\u2581 ", "\u00e9"]
  letters += [
    "\0",
    "[eod]",
    "<pad>",
    "<unk>",
    "<0x41>",
    "7",
    "\u2585",
    "\U0001f600",
  ]
  texts = [
    "".join(rng.choices(letters, k=rng.randrange(9))) for _ in range(999)
  ]
  assert "" in texts
  _assert_same(vocabulary, coder, texts)


def test_ids_without_a_valid_text_decode_as_in_the_vocabulary(
  vocabulary, coder
):
  rng = random.Random(1)
  often = [0, 1, 2, *(i for i in range(300) if "\u2581" in vocabulary.piece(i))]
  rows = [
    rng.choices([*range(300), *often * 20], k=rng.randrange(6))
    for _ in range(300)
  ]
  found = coder.decode(tf2.ragged.constant(rows, tf2.int32)).numpy()
  expected = [vocabulary.decode(row) for row in rows]
  assert [each.decode() for each in found] == expected


def test_a_continuation_is_decoded_as_in_the_vocabulary(vocabulary, coder):
  rng = random.Random(2)
  texts = ["", "a", "a \u2581", " ", "\u00e9"] * 20
  before = vocabulary.encode_batch(texts)
  ids = [rng.choices(range(vocabulary.size), k=3) for _ in texts]
  found = coder.decode_after(
    tf2.ragged.constant(before, tf2.int32), tf2.ragged.constant(ids, tf2.int32)
  )
  assert [each.decode() for each in found.numpy()] == [
    decode_after(vocabulary, *pair) for pair in zip(before, ids, strict=True)
  ]
