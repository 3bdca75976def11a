# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.ngrams import (
  hash_document,
  hash_ngrams,
  hash_words,
)

# Few letters, so that words come again; all kinds of space and of case.
TEXTS = st.one_of(
  st.text(),
  st.text(alphabet="abAB \n\t\x1c\x85\u00a0\u3000\u03a3\u0130", max_size=80),
)


def assert_same_pattern(hashes: np.ndarray, items: list) -> None:
  """Asserts that items have equal hashes if and only if they are equal."""
  assert hashes.dtype == np.uint64
  assert len(hashes) == len(items)
  assert len(set(zip(hashes.tolist(), items, strict=True))) == len(set(items))
  assert len(set(hashes.tolist())) == len(set(items))


@given(st.lists(TEXTS, max_size=4))
def test_words_are_equal_where_those_of_lower_and_split_are(texts):
  hashes = [hash_words(text) for text in texts]
  words = [word for text in texts for word in text.lower().split()]
  assert_same_pattern(np.concatenate([np.empty(0, np.uint64), *hashes]), words)


@given(st.lists(TEXTS, max_size=4), st.integers(1, 9))
def test_ngrams_are_equal_where_the_runs_of_words_are(texts, n):
  hashes, runs = [np.empty(0, np.uint64)], []
  for text in texts:
    words = text.lower().split()
    runs += [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]
    hashes.append(hash_ngrams(hash_words(text), n))
  assert_same_pattern(np.concatenate(hashes), runs)


def test_every_character_is_a_space_or_not_as_in_python():
  characters = [
    chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000
  ]
  for start in range(0, len(characters), 1000):
    text = "x".join(characters[start : start + 1000])
    assert len(hash_words(text)) == len(text.lower().split())


def test_ngrams_of_different_length_and_order_differ():
  words = hash_words("a a a a a")
  hashes = {int(hash_ngrams(words, n)[0]) for n in range(1, 6)}
  assert len(hashes) == 5
  one, other = hash_words("a b"), hash_words("b a")
  assert hash_ngrams(one, 2)[0] != hash_ngrams(other, 2)[0]


@pytest.mark.parametrize("word", ["word", "w" * 700_000])
def test_long_texts_and_long_words_are_hashed_as_short_ones(word):
  text = f"first \u03a3\u03a3 {word} \n" * (900_000 // len(word)) + "last"
  words = text.lower().split()
  assert_same_pattern(hash_words(text), words)
  assert hash_words(text)[-1] == hash_words("last")[0]
  assert hash_words(text)[2] == hash_words(word)[0]


def test_token_ids_are_words():
  ids = np.array([3, 1, 3, 2**31 - 1], np.int32)
  assert_same_pattern(hash_words(ids), ids.tolist())
  assert ids.tolist() == [3, 1, 3, 2**31 - 1]  # not written to


def test_the_words_of_an_example_are_those_of_inputs_and_text():
  example = Document("targets", inputs="some inputs")
  assert np.array_equal(
    hash_document(example), hash_words("some inputs targets")
  )
  assert np.array_equal(hash_document(Document("a b")), hash_words("a b"))


def test_hashes_are_the_same_in_every_process():
  assert hash_words("caf\u00e9").tolist() == [14742842510461381441]
  assert hash_ngrams(hash_words("a b"), 2).tolist() == [5866078744121694792]


def test_many_different_ngrams_have_different_hashes():
  text = " ".join(map(str, range(200_000)))
  for n in (1, 8):
    hashes = hash_ngrams(hash_words(text), n)
    assert len(np.unique(hashes)) == len(hashes)
    # Every bit is set in half of them.
    for bit in range(64):
      share = np.mean(hashes >> np.uint64(bit) & np.uint64(1))
      assert abs(share - 0.5) < 4 * 0.5 / len(hashes) ** 0.5
