# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.contamination import (
  ContainedExamples,
  Contamination,
  ContaminationSearch,
  Examples,
  find_ngrams,
)
from tests.data.processes import peak_memory
from tests.data.small_sources import repeatable

# Few words, so that runs of eight come again; any case, any white space.
TEXTS = st.lists(
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


def by_sets(examples: list[str], training: list[str]) -> Contamination:
  """Returns the contamination, found with sets of tuples of words."""

  def ngrams(text, n):
    words = text.lower().split()
    return [tuple(words[i : i + n]) for i in range(len(words) - n + 1)]

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


@given(TEXTS, TEXTS)
@repeatable(500)
def test_the_contamination_is_that_of_sets_of_ngrams(examples, training):
  assert contamination_of(examples, training) == by_sets(examples, training)


@pytest.mark.parametrize(("shared", "contaminated"), [(13, 0), (14, 1)])
def test_seventy_percent_is_the_border(shared, contaminated):
  words = [f"word{i}" for i in range(17)]  # ten 8-grams
  result = contamination_of([" ".join(words)], [" ".join(words[:shared])])
  assert result.contaminated == contaminated
  assert result.ngram_share == (shared - 7) / 10


def test_a_short_example_is_sought_as_a_whole_and_counted_apart():
  result = contamination_of(
    ["two three", "two four", ""], ["one two three four five six seven eight"]
  )
  assert result == Contamination(
    examples=3,
    judged=3,
    short=3,
    contaminated=1,
    contaminated_short=1,
    ngram_share=0.5,
  )


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


# Few words, so that runs of eight come again; any case, any white space.
_words = st.text(alphabet="abA \n", max_size=60).map(" ".join)


def contains(examples, text: str) -> bool:
  index = ContainedExamples(
    each if isinstance(each, Document) else Document(each) for each in examples
  )
  return index.any_in(find_ngrams(index.table, Document(text)))


def ngrams(text: str) -> list[tuple[str, ...]]:
  words = text.lower().split()
  return [tuple(words[i : i + 8]) for i in range(len(words) - 7)]


@given(st.lists(_words, max_size=6), _words)
@repeatable(500)
def test_a_document_contains_what_sets_of_8_grams_say(examples, text):
  seen = {*ngrams(text)}
  expected = any(
    10 * sum(x in seen for x in ngrams(example)) >= 7 * len(ngrams(example)) > 0
    for example in examples
  )
  assert contains(examples, text) == expected


@given(st.lists(_words, max_size=6), st.lists(_words, max_size=3))
@repeatable(300)
def test_a_text_of_many_documents_contains_what_their_8_grams_say(
  examples, documents
):
  index = ContainedExamples(map(Document, examples))
  found = np.zeros(len(index.table), bool)
  for each in documents:
    found[find_ngrams(index.table, Document(each))] = True
  seen = {ngram for each in documents for ngram in ngrams(each)}
  assert index.contained(found).tolist() == [
    10 * sum(x in seen for x in ngrams(example)) >= 7 * len(ngrams(example)) > 0
    for example in examples
  ]


WORDS = [f"word{i}" for i in range(17)]  # ten 8-grams
OTHER = " ".join(f"other{i}" for i in range(5000))


@pytest.mark.parametrize(("shared", "contained"), [(13, False), (14, True)])
def test_seventy_percent_of_one_example_is_the_border(shared, contained):
  examples = [OTHER, " ".join(WORDS)]
  assert contains(examples, " ".join(WORDS[:shared])) == contained


def test_an_example_is_found_in_the_middle_of_a_long_document():
  assert contains([" ".join(WORDS)], f"{OTHER} {' '.join(WORDS)} {OTHER}")


def test_a_question_and_its_answer_are_one_example():
  example = Document(" ".join(WORDS[10:]), inputs=" ".join(WORDS[:10]))
  assert contains([example], " ".join(WORDS))
  assert not contains([example], " ".join(WORDS[10:]))


def test_parts_of_many_examples_are_no_example():
  # Two of the ten 8-grams of each.
  ends = (f"{i} b c d e f g h".split() for i in "wxyz")
  examples = [" ".join([*WORDS[:9], *end]) for end in ends]
  assert not contains(examples, " ".join(WORDS[:9]))


def test_short_examples_are_counted_and_found_in_nothing():
  examples = ["the answer is yes", "", " ".join(WORDS[:8])]
  index = ContainedExamples(map(Document, examples))
  assert (index.num_examples, index.num_short) == (3, 2)
  assert not contains(examples, "the answer is yes")
  assert contains(examples, " ".join(WORDS))
