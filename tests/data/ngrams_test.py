# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import itertools
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.ngrams import (
  ContainedExamples,
  find_ngrams,
  group_similar,
  hash_ngrams,
  hash_words,
  minhash,
)
from palm_mtf.data.sources.document import Document
from tests.data.near_duplicates import planted, similarity
from tests.data.small_sources import repeatable

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


@given(st.lists(TEXTS, max_size=4), st.integers(1, 9))
def test_ngrams_are_equal_where_the_runs_of_words_are(texts, n):
  hashes, runs = [np.empty(0, np.uint64)], []
  for text in texts:
    runs += ngrams(text, n)
    hashes.append(hash_ngrams(hash_words(text), n))
  assert_same_pattern(np.concatenate(hashes), runs)


def test_every_character_is_a_space_or_not_as_in_python():
  characters = [
    chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000
  ]
  for start in range(0, len(characters), 1000):
    text = "x".join(characters[start : start + 1000])
    assert len(hash_words(text)) == len(text.lower().split())


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


def test_hashes_are_the_same_in_every_process():
  assert hash_words("caf\u00e9").tolist() == [14742842510461381441]
  assert hash_ngrams(hash_words("a b"), 2).tolist() == [5866078744121694792]


def groups_of(texts: list) -> list[int]:
  """Returns the group of each text, which are all different."""
  documents = [Document(text) for text in texts]
  values = [minhash(each, each.digest()) for each in documents]
  return group_similar(np.array(values)).tolist()


@pytest.mark.parametrize("seed", range(2))
def test_groups_are_those_of_the_exact_similarity_of_all_pairs(seed):
  distinct = list(dict.fromkeys(planted(seed)))
  pairs = list(itertools.combinations(distinct, 2))
  near = [pair for pair in pairs if similarity(*pair) >= 0.9]
  unlike = [pair for pair in pairs if similarity(*pair) < 0.6]
  assert len(near) + len(unlike) == len(pairs), "no pair is in doubt"
  groups = {text: {text} for text in distinct}
  for one, other in near:
    joined = groups[one] | groups[other]
    groups.update(dict.fromkeys(joined, joined))
  found = collections.defaultdict(set)
  for text, group in zip(distinct, groups_of(distinct), strict=True):
    found[group].add(text)
  assert {frozenset(x) for x in found.values()} == {
    frozenset(x) for x in groups.values()
  }
  for first, group in found.items():
    assert first == min(map(distinct.index, group))


@pytest.mark.parametrize(
  ("similarity", "probability"),
  [(0.65, 0.0), (0.75, 0.089), (0.8, 0.495), (0.85, 0.934), (0.95, 1.0)],
)
def test_a_pair_is_found_with_the_documented_probability(
  similarity, probability
):
  num_pairs, num_runs = 300, 400
  rng = np.random.default_rng(0)
  texts = []
  own = round(num_runs * (1 - similarity) / 2)
  shared = num_runs - 2 * own
  for _ in range(num_pairs):
    start = rng.integers(1 << 40, size=shared + 4)
    for _ in range(2):
      ids = np.concatenate([start, rng.integers(1 << 40, size=own)])
      texts.append(ids)
  found = (len(texts) - len({*groups_of(texts)})) / num_pairs
  deviation = (probability * (1 - probability) / num_pairs) ** 0.5
  assert abs(found - probability) <= 4 * deviation + 0.01


IDS = np.random.default_rng(0).integers(0, 30000, 500)


@pytest.mark.parametrize(
  ("texts", "groups"),
  [
    (["Three short words", "three  short words\n", "three"], [0, 0, 2]),
    ([" ", "  ", "\n", ""], [0, 1, 2, 3]),  # no words, near no other
    ([IDS, IDS[::-1].copy(), np.append(IDS, 7)], [0, 1, 0]),
  ],
  ids=["short", "empty", "token ids"],
)
def test_short_and_empty_texts_and_token_ids_have_their_groups(texts, groups):
  assert groups_of(texts) == groups


# Few words, so that runs of eight come again; any case, any white space.
FOUND_TEXTS = st.lists(
  st.text(alphabet="abA \n", max_size=60).map(lambda text: " ".join(text)),
  max_size=6,
)


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
  words = text.lower().split()
  return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


WORDS = [f"word{i}" for i in range(17)]  # ten 8-grams
OTHER = " ".join(f"other{i}" for i in range(5000))


@pytest.mark.parametrize(("shared", "found"), [(13, False), (14, True)])
def test_seventy_percent_is_the_border(shared, found):
  example, text = " ".join(WORDS), " ".join(WORDS[:shared])
  assert contains([OTHER, example], text) == found


def contains(examples, text: str) -> bool:
  index = ContainedExamples(
    each if isinstance(each, Document) else Document(each) for each in examples
  )
  return index.any_in(find_ngrams(index.table, Document(text)))


def contained_by_sets(examples, documents) -> list[bool]:
  seen = {ngram for each in documents for ngram in ngrams(each, 8)}
  return [
    10 * sum(x in seen for x in found) >= 7 * len(found) > 0
    for found in (ngrams(example, 8) for example in examples)
  ]


@given(FOUND_TEXTS, FOUND_TEXTS)
@repeatable(120)
def test_a_text_of_many_documents_contains_what_their_8_grams_say(
  examples, documents
):
  index = ContainedExamples(map(Document, examples))
  found = np.zeros(len(index.table), bool)
  for each in documents:
    mine = find_ngrams(index.table, Document(each))
    assert index.any_in(mine) == any(contained_by_sets(examples, [each]))
    found[mine] = True
  expected = contained_by_sets(examples, documents)
  assert index.contained(found).tolist() == expected


def test_a_question_and_its_answer_are_one_example():
  example = Document(" ".join(WORDS[10:]), inputs=" ".join(WORDS[:10]))
  assert contains([example], " ".join(WORDS))
  assert not contains([example], " ".join(WORDS[10:]))
