# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.document import Document, cut_text, num_repeats

DOCUMENTS = [f"document {i}" for i in range(4000)]


def near(count: int, share: float) -> bool:
  """Returns whether `count` of 4000 is `share` within four deviations."""
  return abs(count - 4000 * share) <= 4 * (4000 * share * (1 - share)) ** 0.5


def test_ranks_are_spread_evenly():
  ranks = np.array([Document(text).rank for text in DOCUMENTS])
  assert ((ranks >= 0) & (ranks < 1)).all()
  for share in (0.02, 0.2, 0.5, 0.9):
    assert near((ranks < share).sum(), share)


@given(st.text(), st.text())
def test_hashes_depend_on_inputs_and_text_and_where_one_ends(inputs, text):
  joined = Document(inputs + text)
  split = Document(text, inputs)
  assert split.digest(16) == Document(text, inputs, weight=3.0).digest(16)
  assert split.digest(16) != joined.digest(16)
  assert split.rank == Document(text, inputs, weight=3.0).rank
  assert split.rank != joined.rank


@given(st.text())
def test_size_is_that_in_utf8(text):
  assert Document(text).num_bytes == len(text.encode())
  assert Document(text, "\u00e9").num_bytes == len(text.encode()) + 2


def test_token_ids_have_a_rank_and_a_size():
  ids = np.arange(5, dtype=np.int32)
  assert Document(ids).num_bytes == 20
  assert Document(ids).rank == Document(ids.copy()).rank
  assert Document(ids).rank != Document(ids[::-1].copy()).rank


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.5, 1.0, 2.25, 17.0])
def test_a_weight_is_the_mean_number_of_repeats(weight):
  times = int(weight)
  repeats = [num_repeats(Document(t, weight=weight)) for t in DOCUMENTS]
  assert set(repeats) == {times, math.ceil(weight)}
  assert near(sum(r > times for r in repeats), weight - times)


def test_repeats_tell_nothing_about_the_split():
  documents = [Document(text, weight=0.5) for text in DOCUMENTS]
  for share in (0.1, 0.5):
    held_out = [d for d in documents if d.rank < share]
    kept = sum(map(num_repeats, held_out))
    deviation = 4 * (len(held_out) / 4) ** 0.5
    assert abs(kept - len(held_out) / 2) < deviation


@given(st.text("ab\n"), st.integers(1, 9))
def test_parts_are_short_make_the_text_again_and_end_with_a_line_if_one_fits(
  text, size
):
  parts = list(cut_text(text, size))
  assert "".join(parts) == text
  for part, following in itertools.pairwise([*parts, ""]):
    assert 0 < len(part) <= size
    # More lines would not fit, or not even one line fits.
    line = following.partition("\n")[0]
    is_whole = part.endswith("\n") and len(part + line) >= size
    assert is_whole or ("\n" not in part and len(part) == size) or not following
