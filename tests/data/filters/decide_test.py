# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.config.data import FilterConfig
from palm_mtf.data import worker_pool
from palm_mtf.data.filters.decide import REASONS, count_removed, decide
from palm_mtf.data.ngrams import ContainedExamples
from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.errors import UserError
from tests.data.near_duplicates import planted, similarity
from tests.data.processes import peak_memory
from tests.data.small_sources import ListSource, repeatable

# Documents of a source: (text, weight, whether it is held out).
_documents = st.lists(
  st.tuples(st.sampled_from("abcd"), st.integers(0, 3), st.booleans()),
  max_size=8,
)


def documents_that_stay(sources) -> list[list[tuple]]:
  """Returns the documents of each source that stay, sorted."""
  sources = [
    ListSource(
      *(
        [Document(t, weight=w) for t, w, held_out in source if held_out == x]
        for x in (False, True)
      )
    )
    for source in sources
  ]
  removed = decide(sources, FilterConfig(remove_duplicates="exact"))
  return [
    sorted(
      (each.text, each.weight, split == VALIDATION)
      for (split, each), reason in zip(source.documents(), mine, strict=True)
      if REASONS[reason] != "exact_duplicates"
    )
    for source, mine in zip(sources, removed, strict=True)
  ]


def chosen_by_hand(sources) -> list[list[tuple]]:
  best = {}
  for number, source in enumerate(sources):
    for text, weight, held_out in source:
      rank = (weight == 0, not held_out, number, -weight)
      best[text] = min(best.get(text, rank), rank)
  found = [[] for _ in sources]
  for text, (_, in_training, number, weight) in best.items():
    found[number].append((text, -weight, not in_training))
  return [sorted(each) for each in found]


@given(st.lists(_documents, min_size=1, max_size=3), st.randoms())
@repeatable(60)
def test_of_equal_texts_the_one_of_the_rule_stays_in_any_order(sources, random):
  expected = chosen_by_hand(sources)
  assert documents_that_stay(sources) == expected
  for source in sources:
    random.shuffle(source)
  assert documents_that_stay(sources) == expected


def reasons(source, **filters) -> list[str]:
  (decisions,) = decide([source], FilterConfig(**filters))
  return [REASONS[each] for each in decisions]


def test_length_is_of_inputs_and_text_in_utf_8_and_both_bounds_are_kept():
  source = ListSource(
    ["\u00e9", "abc", "abcd", Document("ab", "cd"), Document("ab", "cde")],
    ["a"],
  )
  found = reasons(source, min_document_bytes=3, max_document_bytes=4)
  assert found == ["too_short", "", "", "", "too_long", "too_short"]


def test_only_a_quality_below_the_lowest_is_removed_before_duplicates_are():
  qualities = (0.4, 0.5, 2)
  source = ListSource([Document("a", quality=x) for x in qualities])
  found = reasons(
    source, quality_field="q", min_quality=0.5, remove_duplicates="exact"
  )
  assert found == ["low_quality", "", "exact_duplicates"]


def kept_by_hand(sources) -> list[list[str]]:
  """Compares every pair; returns the texts that each source keeps, sorted."""
  source_of = {}
  for number, texts in reversed([*enumerate(sources)]):
    source_of |= dict.fromkeys(texts, number)
  groups = {text: {text} for text in source_of}
  for one, other in itertools.combinations(source_of, 2):
    if groups[one] is not groups[other] and similarity(one, other) > 0.9:
      groups[one] |= groups[other]
      groups |= dict.fromkeys(groups[other], groups[one])
  kept = [[] for _ in sources]
  for group in {id(each): each for each in groups.values()}.values():
    first = min(source_of[text] for text in group)
    kept[first].append({text for text in group if source_of[text] == first})
  return kept


def kept(sources, num_processes=0) -> list[list[Document]]:
  filters = FilterConfig(remove_duplicates="near")
  found = decide(sources, filters, None, num_processes)
  return [
    sorted(
      document.text
      for (_, document), removed in zip(source.documents(), mine, strict=True)
      if not removed
    )
    for source, mine in zip(sources, found, strict=True)
  ]


@pytest.mark.parametrize("seed", range(2))
def test_one_of_each_group_of_near_duplicates_stays_that_of_the_first_source(
  seed,
):
  texts = planted(seed, 12)
  split = [texts[::2], texts[1::2]]
  sources = [ListSource(each, name=f"{i}") for i, each in enumerate(split)]
  found = kept(sources)
  expected = kept_by_hand(split)
  for mine, groups in zip(found, expected, strict=True):
    assert len(mine) == len(groups)
    counts = collections.Counter(
      number for number, g in enumerate(groups) for t in mine if t in g
    )
    assert counts == dict.fromkeys(range(len(groups)), 1)


def test_neither_order_nor_split_nor_processes_change_what_stays(monkeypatch):
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 0)
  texts = [*planted(0, 12), *planted(1, 12)]
  first = kept([ListSource(texts)])
  assert kept([ListSource(texts)], 2) == first
  assert kept([ListSource(texts[::2], texts[1::2])]) == first
  shuffled = [
    texts[i] for i in np.random.default_rng(0).permutation(len(texts))
  ]
  assert kept([ListSource(shuffled)]) == first


def test_exact_and_near_duplicates_are_counted_apart():
  texts = planted(2, 12)
  source = ListSource(texts)
  (decisions,) = decide([source], FilterConfig(remove_duplicates="near"))
  counts = count_removed(decisions)
  assert counts["removed_exact_duplicates"] == len(texts) - len({*texts})
  (groups,) = kept_by_hand([texts])
  assert counts["removed_near_duplicates"] == len({*texts}) - len(groups)


EXAMPLE = " ".join(f"question{i}" for i in range(20))


def contaminated(source, filters, num_processes=0) -> list[str]:
  examples = ContainedExamples([Document(EXAMPLE)])
  (found,) = decide([source], filters, examples, num_processes)
  return [REASONS[each] for each in found]


@pytest.mark.parametrize("num_processes", [0, 1])
def test_documents_with_an_example_are_removed_before_duplicates_are_found(
  num_processes, monkeypatch
):
  monkeypatch.setattr(worker_pool, "_BATCHES_BEFORE_PROCESSES", 0)
  # The second is a near duplicate of the first, without the example.
  filler = " ".join(f"w{i}" for i in range(500))
  documents = [f"{EXAMPLE} {filler}", filler, "x", "too long " * 999, filler]
  source = ListSource(documents, [f"a {EXAMPLE}", "y"])
  filters = FilterConfig(remove_duplicates="near", max_document_bytes=8000)
  assert contaminated(source, filters, num_processes) == [
    *("contaminated", "", "", "too_long", "exact_duplicates"),
    *("contaminated", ""),
  ]
  alone = contaminated(source, FilterConfig(min_document_bytes=2))
  assert [x for x in alone if x] == 2 * ["contaminated", "too_short"]


def test_token_ids_are_not_compared_with_texts():
  source = ListSource([Document(np.arange(30))], name="ids")
  with pytest.raises(UserError, match=r"^DECONTAMINATE_TASKS: ids makes token"):
    contaminated(source, FilterConfig())


class LongDocuments(ListSource):
  """A source of `count` documents of 200 KB, made when they are read."""

  def __init__(self, count: int):
    super().__init__([])
    self._count = count

  def documents(self):
    for i in range(self._count):
      yield TRAIN, Document(f"{i} some words and more\n" * 8000)


def test_memory_does_not_grow_with_the_text():
  examples = ContainedExamples([Document(EXAMPLE)])

  def run(count):
    filters = FilterConfig(remove_duplicates="near")
    decide([LongDocuments(count)], filters, examples, 0)

  run(1)  # tables of hashes are made once
  # Other threads of the process may allocate meanwhile, so take the least.
  peaks = [
    min(peak_memory(lambda n=n: run(n)) for _ in range(3)) for n in (5, 20)
  ]
  assert max(peaks) < 1.1 * min(peaks)
