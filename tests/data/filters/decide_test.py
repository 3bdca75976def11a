# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import numpy as np

from palm_mtf.config.filters import FilterConfig
from palm_mtf.data.filters.decide import REASONS, count_removed, decide
from palm_mtf.data.sources.document import Document
from tests.data.small_sources import ListSource


def reasons(source, **filters) -> list[str]:
  (decisions,) = decide([source], FilterConfig(**filters))
  return [REASONS[each] for each in decisions]


def test_length_is_of_inputs_and_text_in_utf_8_and_both_bounds_are_kept():
  source = ListSource(
    ["\u00e9", "abc", "abcd", Document("ab", "cd"), Document("ab", "cde")],
    ["a"],
  )
  assert reasons(source, min_document_bytes=3, max_document_bytes=4) == [
    "too_short",
    "",
    "",
    "",
    "too_long",
    "too_short",
  ]


def test_a_quality_below_the_lowest_is_removed_and_the_lowest_is_kept():
  source = ListSource([Document("a", quality=x) for x in (0.4, 0.5, 2)])
  found = reasons(source, quality_field="q", min_quality=0.5)
  assert found == ["low_quality", "", ""]


def test_none_is_the_duplicate_of_a_document_that_another_filter_removes():
  documents = [Document("a", weight=2, quality=0), Document("a", quality=1)]
  source = ListSource([*documents, documents[1]])
  found = reasons(
    source, quality_field="q", min_quality=1, remove_duplicates="exact"
  )
  assert found == ["low_quality", "", "exact_duplicates"]


def test_duplicates_are_found_among_sources_and_the_first_source_keeps_them():
  sources = [
    ListSource(["a", "b"], name="first"),
    ListSource(["b", "c", "a"], ["d", "d"], name="second"),
  ]
  found = decide(sources, FilterConfig(remove_duplicates="exact"))
  exact = REASONS.index("exact_duplicates")
  assert [each.tolist() for each in found] == [
    [0, 0],
    [exact, 0, exact, 0, exact],
  ]


def test_every_document_is_counted_once():
  decisions = np.array([0, 1, 1, 0, 4, 2], np.uint8)
  counts = count_removed(decisions)
  assert counts["documents_read"] == 6
  assert counts["removed_low_quality"] == 2
  assert sum(counts.values()) - 6 == 4
