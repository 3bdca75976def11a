# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import collections
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.batches import document_stream
from palm_mtf.data.batches.document_stream import DocumentStream, TokenSource
from tests.data.small_sources import numbered, repeatable

LENGTHS = np.random.default_rng(0).integers(1, 60, 400)


def stream_of(*sources: tuple[float, list[int]], seed: int = 0):
  """Returns the stream of sources, each a rate and its documents' lengths."""
  return DocumentStream(
    [
      TokenSource(str(i), rate, numbered(lengths))
      for i, (rate, lengths) in enumerate(sources)
    ],
    seed=seed,
  )


def of_source(stretches, source: int) -> list:
  return [x for x in stretches if x.source == source]


@pytest.fixture(params=[50, 2000, 1 << 26])
def block_tokens(request, monkeypatch):
  """Makes blocks of so many tokens, smaller than documents or than sources."""
  monkeypatch.setattr(document_stream, "_BLOCK_TOKENS", request.param)
  return request.param


def test_every_epoch_of_one_source_has_every_token_once(block_tokens):
  stream, size = stream_of((1.0, LENGTHS)), int(sum(LENGTHS))
  for epoch in range(3):
    found = stream.stretches(epoch * size, (epoch + 1) * size)
    assert {x.epoch for x in found} == {epoch}
    assert sorted(x.document for x in found) == list(range(len(LENGTHS)))
    assert all(x.length == LENGTHS[x.document] for x in found)


def test_documents_of_a_mixture_come_whole_and_once_in_every_epoch(
  block_tokens,
):
  sources = (0.5, LENGTHS[:100]), (0.3, LENGTHS[100:140]), (0.2, LENGTHS[140:])
  stream = stream_of(*sources)
  found = stream.stretches(0, 40_000)[:-1]  # the last is cut
  for source, (_, lengths) in enumerate(sources):
    mine = of_source(found, source)
    for epoch, group in itertools.groupby(mine, lambda x: x.epoch):
      documents = [x.document for x in group]
      assert len(set(documents)) == len(documents)
      if epoch < mine[-1].epoch:
        assert sorted(documents) == list(range(len(lengths)))
    assert all(x.begin == 0 and x.length == lengths[x.document] for x in mine)


@pytest.mark.parametrize("rates", [(0.5, 0.3, 0.2), (0.9, 0.09, 0.01)])
def test_every_source_has_its_rate_of_tokens_to_within_a_document(
  block_tokens, rates
):
  parts = LENGTHS[:100], LENGTHS[100:140], LENGTHS[140:]
  stream = stream_of(*zip(rates, parts, strict=True))
  for block in (1, 2, 7, 10**6):
    position = stream.start_of(block)
    numbers = stream._starts(block)
    for (_, tokens), rate in zip(numbers, rates, strict=True):
      assert abs(tokens - rate * position) <= 3 * 60


@hypothesis.given(st.integers(0, 10**5), st.integers(1, 500))
@repeatable(30)
def test_any_part_is_that_part_of_the_whole(begin, length):
  sources = (0.6, LENGTHS[:60]), (0.4, LENGTHS[60:90])
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(document_stream, "_BLOCK_TOKENS", 700)
    # From another start, and from a stream that has read nothing yet.
    whole = tokens_of(
      stream_of(*sources).stretches(max(0, begin - 999), begin + 999)
    )
    part = tokens_of(stream_of(*sources).stretches(begin, begin + length))
  offset = begin - max(0, begin - 999)
  assert part == whole[offset : offset + length]


def tokens_of(stretches) -> list[tuple[int, int, int]]:
  return [
    (x.source, x.epoch, x.start + i) for x in stretches for i in range(x.length)
  ]


def shares_of_neighbours(stretches, group_of) -> float:
  """Returns the share of neighbours that are of one group."""
  groups = list(map(group_of, stretches))
  same = [a == b for a, b in itertools.pairwise(groups)]
  return sum(same) / len(same)


def test_neighbours_are_of_one_folder_no_more_often_than_chance():
  num_folders, of_folder = 25, 200  # as files are read: folder by folder
  stream = stream_of((1.0, [7] * (num_folders * of_folder)))
  found = stream.stretches(0, 7 * num_folders * of_folder)
  share = shares_of_neighbours(found, lambda x: x.document // of_folder)
  chance, count = 1 / num_folders, len(found)
  assert abs(share - chance) < 4 * (chance * (1 - chance) / count) ** 0.5


def test_neighbours_are_of_one_source_no_more_often_than_chance():
  rates = (0.5, 0.3, 0.2)
  stream = stream_of(*((rate, [7] * 3000) for rate in rates))
  found = stream.stretches(0, 7 * 9000)
  share = shares_of_neighbours(found, lambda x: x.source)
  chance, count = sum(rate**2 for rate in rates), len(found)
  assert abs(share - chance) < 4 * (chance * (1 - chance) / count) ** 0.5
  # And neighbours of one source are no neighbours in its text.
  mine = [x.document for x in of_source(found, 0)]
  near = sum(abs(a - b) == 1 for a, b in itertools.pairwise(mine))
  assert near < 12  # 2 are expected, as 2 / 3,000 of pairs are


def test_repeats_of_a_document_lie_as_far_apart_as_chance_puts_them():
  """A document of weight 3 stands three times in a row in its shard."""
  num_texts = 2000
  stream = stream_of((1.0, [5] * (3 * num_texts)))
  found = stream.stretches(0, 5 * 3 * num_texts)
  places = collections.defaultdict(list)
  for place, each in enumerate(found):
    places[each.document // 3].append(place)
  gaps = np.array([np.diff(x) for x in places.values()]) / len(found)
  # Of three uniform places, a gap is a quarter of the whole on average, and
  # its standard deviation is sqrt(3 / 80).
  error = (3 / 80 / num_texts) ** 0.5
  assert np.abs(gaps.mean(axis=0) - 0.25).max() < 4 * error
