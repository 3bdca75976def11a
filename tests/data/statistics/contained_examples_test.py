# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.document import Document
from palm_mtf.data.statistics.contained_examples import (
  ContainedExamples,
  find_ngrams,
)
from tests.data.small_sources import repeatable

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
