# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from palm_mtf.config import DataConfig, FilterConfig
from palm_mtf.config.data import SpanCorruption
from palm_mtf.errors import UserError


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    (
      {"remove_duplicates": "exakt"},
      "REMOVE_DUPLICATES = 'exakt' (did you mean \"exact\"?): choose one of ",
    ),
    (
      {"min_document_bytes": -1},
      "MIN_DOCUMENT_BYTES = -1: give a whole number of at least 0.",
    ),
    (
      {"min_document_bytes": 9, "max_document_bytes": 8},
      "MAX_DOCUMENT_BYTES = 8: give a whole number of at least 9.",
    ),
    (
      {"decontaminate_tasks": "squad"},
      "DECONTAMINATE_TASKS = 'squad': give a list of names of SeqIO tasks, or ",
    ),
    (
      {"decontaminate_files": []},
      "DECONTAMINATE_FILES = []: give a glob, a list of globs, or None.",
    ),
    (
      {"quality_field": "q"},
      "QUALITY_FIELD = 'q' and MIN_QUALITY = None: set both of them, or ",
    ),
    (
      {"min_quality": 1},
      "QUALITY_FIELD = None and MIN_QUALITY = 1: set both of them, or neither",
    ),
    (
      {"quality_field": "q", "min_quality": "0.5"},
      "MIN_QUALITY = '0.5': give a number from ",
    ),
  ],
)
def test_a_wrong_filter_is_named(settings, message):
  with pytest.raises(UserError) as info:
    FilterConfig(**settings)
  assert str(info.value).startswith(message)


def test_a_quality_is_of_text_files():
  filters = FilterConfig(quality_field="q", min_quality=0)
  with pytest.raises(UserError, match=r"^QUALITY_FIELD = 'q': is a field of T"):
    DataConfig(
      task="some",
      text_files=None,
      vocabulary=None,
      validation_share=0.1,
      filters=filters,
    )


def test_defaults_remove_nothing_and_any_filter_is_seen():
  assert not FilterConfig().removes
  assert not FilterConfig(decontaminate_tasks=[]).removes
  assert FilterConfig(decontaminate_tasks=["squad"]).removes
  assert FilterConfig(min_document_bytes=1).removes
  assert FilterConfig(remove_duplicates="exact").removes


@pytest.mark.parametrize("density", [0.01, 0.15, 0.5, 0.99])
@pytest.mark.parametrize("mean", [1.0, 3.0, 100.0])
def test_the_longest_text_fits_a_row_and_no_longer_one_does(density, mean):
  noise = SpanCorruption(density, mean)
  for row in range(1, 300):
    fitting = [n for n in range(row + 1) if noise.row_length(n) <= row]
    assert noise.longest_text(row) == max(fitting)


def test_the_longest_text_of_a_very_long_row_takes_a_few_looks():
  looked_at = []

  class Counted(SpanCorruption):
    def row_length(self, length: int) -> int:
      looked_at.append(length)
      return super().row_length(length)

  Counted(0.99, 1.0).longest_text(2**24)
  assert len(looked_at) < 100
