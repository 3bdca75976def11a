# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import itertools
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.document import SPLITS, TRAIN, VALIDATION, Document
from palm_mtf.data.statistics.near_duplicates import (
  Duplicates,
  Sketches,
  find_duplicates,
)


def sketch(texts, split=TRAIN) -> Sketches:
  sketches = Sketches()
  for text in texts:
    sketches.add(Document(text), split)
  return sketches


def duplicates_of(texts, num_largest=3) -> Duplicates:
  return find_duplicates([sketch(texts)], num_largest)


def runs_of(text: str) -> set[tuple[str, ...]]:
  words = text.lower().split()
  n = min(5, len(words))
  return {tuple(words[i : i + n]) for i in range(len(words) - n + 1)}


def similarity(one: str, other: str) -> float:
  """Exact Jaccard similarity of the sets of 5-word runs."""
  a, b = runs_of(one), runs_of(other)
  return len(a & b) / max(1, len(a | b))


def edited(text: str, num_edits: int, rng: np.random.Generator) -> str:
  words = text.split()
  for place in rng.choice(len(words), num_edits, replace=False):
    words[place] = f"edit{rng.integers(1 << 40)}"
  return " ".join(words)


def random_text(rng: np.random.Generator, num_words: int) -> str:
  return " ".join(map(str, rng.integers(0, 5000, num_words)))


def planted(seed: int) -> list[str]:
  """Returns texts, near copies of some, and texts with half of another."""
  rng = np.random.default_rng(seed)
  texts = [random_text(rng, 300) for _ in range(30)]
  near = [edited(text, 1, rng) for text in texts[:10] for _ in range(3)]
  halves = [
    " ".join([*text.split()[:150], random_text(rng, 150)])
    for text in texts[10:20]
  ]
  return [*texts, *near, *halves, texts[0], texts[0], near[5]]


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


@pytest.mark.parametrize("seed", range(5))
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


def test_a_huge_group_is_one_group():
  rng = np.random.default_rng(0)
  text = random_text(rng, 300)
  found = duplicates_of([edited(text, 1, rng) for _ in range(500)])
  assert (found.near_groups, found.near_texts) == (1, 499)


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
  for num_words in (10, 3000):
    documents = (
      Document(rng.integers(0, 1 << 40, num_words)) for _ in range(2000)
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
    assert 281 <= held / 2000 < 281 * 1.2
    assert (peak - held) / 2000 < 950
