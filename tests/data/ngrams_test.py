# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import itertools
import operator
import sys
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.ngrams import (
  ContainedExamples,
  Contamination,
  ContaminationSearch,
  Duplicates,
  Examples,
  Sketches,
  find_duplicates,
  find_ngrams,
  hash_ngrams,
  hash_words,
)
from palm_mtf.data.sources.document import SPLITS, TRAIN, VALIDATION, Document
from tests.data.near_duplicates import edited, planted, random_text, similarity
from tests.data.processes import peak_memory
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


def sketch(texts, split=TRAIN) -> Sketches:
  sketches = Sketches()
  for text in texts:
    sketches.add(Document(text), split)
  return sketches


def duplicates_of(texts, num_largest=3) -> Duplicates:
  return find_duplicates([sketch(texts)], num_largest)


@given(st.lists(st.sampled_from(["", " ", "a", "a b", "b", "\u00e9"])))
def test_exact_copies_are_those_that_a_count_of_texts_finds(texts):
  found = duplicates_of(texts or ["a"], num_largest=9)
  counts = collections.Counter(texts or ["a"])
  assert found.num_texts == len(counts)
  assert found.exact_documents == counts.total() - len(counts)
  assert found.exact_bytes == sum(
    (count - 1) * len(text.encode()) for text, count in counts.items()
  )
  assert {(x.size, x.digest) for x in found.largest_exact} == {
    (count, Document(text).digest())
    for text, count in counts.items()
    if count > 1
  }


@pytest.mark.parametrize("seed", range(2))
def test_groups_are_those_of_the_exact_similarity_of_all_pairs(seed):
  texts = planted(seed)
  distinct = list(dict.fromkeys(texts))
  pairs = list(itertools.combinations(distinct, 2))
  near = [pair for pair in pairs if similarity(*pair) >= 0.9]
  unlike = [pair for pair in pairs if similarity(*pair) < 0.6]
  assert len(near) + len(unlike) == len(pairs), "no pair is in doubt"
  groups = {text: {text} for text in distinct}
  for one, other in near:
    joined = groups[one] | groups[other]
    groups.update(dict.fromkeys(joined, joined))
  expected = [
    list(group)
    for group in {frozenset(group) for group in groups.values()}
    if len(group) > 1
  ]
  found = duplicates_of(texts, num_largest=99)
  assert found.near_groups == len(expected) == 10
  assert sorted(x.size for x in found.largest_near) == sorted(
    map(len, expected)
  )
  assert found.near_texts == sum(len(group) - 1 for group in expected)
  sizes = [[len(text) for text in group] for group in expected]
  assert found.near_bytes == sum(sum(each) - max(each) for each in sizes)
  digests = {
    Document(text).digest(): i
    for i, group in enumerate(expected)
    for text in group
  }
  named = [digests[group.digest] for group in found.largest_near]
  assert sorted(named) == list(range(10)), "each names one of its members"


@pytest.mark.parametrize(
  ("similarity", "probability"),
  [(0.65, 0.0), (0.75, 0.089), (0.8, 0.495), (0.85, 0.934), (0.95, 1.0)],
)
def test_a_pair_is_found_with_the_documented_probability(
  similarity, probability
):
  num_pairs, num_runs = 300, 400
  rng = np.random.default_rng(0)
  sketches = Sketches()
  own = round(num_runs * (1 - similarity) / 2)
  shared = num_runs - 2 * own
  for _ in range(num_pairs):
    start = rng.integers(1 << 40, size=shared + 4)
    for _ in range(2):
      ids = np.concatenate([start, rng.integers(1 << 40, size=own)])
      sketches.add(Document(ids), TRAIN)
  found = find_duplicates([sketches]).near_groups / num_pairs
  deviation = (probability * (1 - probability) / num_pairs) ** 0.5
  assert abs(found - probability) <= 4 * deviation + 0.01


def test_the_order_of_documents_and_their_sources_change_nothing():
  texts = planted(0)
  splits = [SPLITS[i % 3 == 0] for i in range(len(texts))]
  rng = np.random.default_rng(0)
  results = []
  for num_sources in (1, 1, 3):
    sketches = [Sketches() for _ in range(num_sources)]
    for i in rng.permutation(len(texts)):
      into = sketches[rng.integers(num_sources)]
      into.add(Document(texts[i]), splits[i])
    results.append(find_duplicates(sketches, num_largest=99))
  assert results[0] == results[1] == results[2]
  assert results[0].near_across > 0
  assert results[0].exact_across > 0


def test_copies_across_the_border_are_counted_as_held_out_documents():
  rng = np.random.default_rng(0)
  texts = [random_text(rng, 200) for _ in range(6)]
  near = [edited(text, 1, rng) for text in texts]
  sketches = sketch([*texts[:4], texts[0], near[2]])
  held_out = (texts[0], texts[0], near[1], near[1], texts[4], near[4], texts[2])
  for text in held_out:
    sketches.add(Document(text), VALIDATION)
  found = find_duplicates([sketches])
  # texts[0] twice; texts[2], which is also similar to near[2].
  assert found.exact_across == 3
  assert found.near_across == 2  # near[1] twice; near[4] meets no training


IDS = np.random.default_rng(0).integers(0, 30000, 500)


@pytest.mark.parametrize(
  ("texts", "exact_documents", "near_groups"),
  [
    (["Three short words", "three  short words\n", "three"], 0, 1),
    ([" ", "  ", "\n", ""], 0, 0),  # no words, near no other
    ([IDS, IDS[::-1].copy(), np.append(IDS, 7), IDS], 1, 1),
    ([], 0, 0),
  ],
  ids=["short", "empty", "token ids", "none"],
)
def test_short_and_empty_texts_and_token_ids_have_their_duplicates(
  texts, exact_documents, near_groups
):
  found = duplicates_of(texts)
  assert found.exact_documents == exact_documents
  assert found.near_groups == found.near_texts == near_groups
  assert found.num_texts == len(texts) - exact_documents
  assert found.exact_across == found.near_across == 0


def test_memory_is_that_of_the_sketches_however_long_the_documents_are():
  rng = np.random.default_rng(0)
  for num_words in (10, 1500):
    documents = (
      Document(rng.integers(0, 1 << 40, num_words)) for _ in range(1000)
    )
    tracemalloc.start()
    sketches = Sketches()
    for document in documents:
      sketches.add(document, TRAIN)
    del document
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    find_duplicates([sketches])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 281 <= held / 1000 < 281 * 1.2
    assert (peak - held) / 1000 < 950


# Few words, so that runs of eight come again; any case, any white space.
FOUND_TEXTS = st.lists(
  st.text(alphabet="abA \n", max_size=60).map(lambda text: " ".join(text)),
  max_size=6,
)


def contamination_of(examples, training, max_ngrams=10**6) -> Contamination:
  """Returns the contamination of texts or Documents."""
  kept = Examples(max_ngrams)
  for each in examples:
    kept.add(each if isinstance(each, Document) else Document(each))
  search = ContaminationSearch(kept)
  for each in training:
    search.add(each if isinstance(each, Document) else Document(each))
  return search.result()


def ngrams(text: str, n: int) -> list[tuple[str, ...]]:
  words = text.lower().split()
  return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]


def by_sets(examples: list[str], training: list[str]) -> Contamination:
  """Returns the contamination, found with sets of tuples of words."""
  seen = {
    ngram for text in training for n in range(1, 9) for ngram in ngrams(text, n)
  }
  lengths = [len(text.split()) for text in examples]
  found = [
    [ngram in seen for ngram in ngrams(text, max(1, min(8, length)))]
    for text, length in zip(examples, lengths, strict=True)
  ]
  contaminated = [10 * sum(x) >= 7 * len(x) > 0 for x in found]
  short = [length < 8 for length in lengths]
  return Contamination(
    examples=len(examples),
    judged=len(examples),
    short=sum(short),
    contaminated=sum(contaminated),
    contaminated_short=sum(map(operator.and_, contaminated, short)),
    ngram_share=sum(map(sum, found)) / max(1, sum(map(len, found))),
  )


@given(FOUND_TEXTS, FOUND_TEXTS)
@repeatable(120)
def test_the_contamination_is_that_of_sets_of_ngrams(examples, training):
  assert contamination_of(examples, training) == by_sets(examples, training)


WORDS = [f"word{i}" for i in range(17)]  # ten 8-grams
OTHER = " ".join(f"other{i}" for i in range(5000))


@pytest.mark.parametrize(("shared", "found"), [(13, False), (14, True)])
def test_seventy_percent_is_the_border(shared, found):
  example, text = " ".join(WORDS), " ".join(WORDS[:shared])
  result = contamination_of([example], [text])
  assert result.contaminated == found
  assert result.ngram_share == (shared - 7) / 10
  assert contains([OTHER, example], text) == found


def test_a_large_evaluation_set_is_judged_by_a_sample_of_any_order():
  rng = np.random.default_rng(0)
  texts = [" ".join(map(str, rng.integers(0, 1 << 40, 27))) for _ in range(500)]
  results = {
    contamination_of(
      rng.permutation(texts).tolist(), texts[:250], max_ngrams=2000
    )
    for _ in range(3)
  }
  (result,) = results
  assert (result.examples, result.judged) == (500, 100)  # 20 8-grams each
  # Four standard deviations of a draw without replacement.
  assert abs(result.contaminated - 50) < 4 * (100 * 0.25 * 0.8) ** 0.5


def test_an_example_of_more_ngrams_than_are_kept_is_searched_nevertheless():
  text = " ".join(map(str, range(100)))
  assert contamination_of([text], [text], max_ngrams=10).contaminated == 1


def test_memory_does_not_grow_with_the_training_text_or_the_evaluation_set():
  def search(num_documents):
    rng = np.random.default_rng(0)

    def documents():
      for _ in range(num_documents):
        yield Document(rng.integers(0, 1 << 40, 500))

    found = contamination_of(documents(), documents(), max_ngrams=20_000)
    assert found.examples == num_documents

  peaks = [peak_memory(lambda n=n: search(n)) for n in (300, 1200)]
  assert max(peaks) < 1.1 * min(peaks)
  assert max(peaks) < 75 * 20_000


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
