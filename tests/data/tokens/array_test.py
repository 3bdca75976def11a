# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.tokens.array import Shard, TokenArray
from tests.data.small_sources import EOD, examples, repeatable, token_array

_shards = st.lists(st.lists(examples(), max_size=4), max_size=5)


@hypothesis.given(_shards, st.data(), st.booleans())
@repeatable(300)
def test_reading_across_shards_is_a_slice_of_all_of_them(
  shards, data, has_inputs
):
  tokens = token_array(*shards, has_inputs=has_inputs)
  every, learnt = [], []
  for inputs, text in list(itertools.chain(*shards)):
    every += [*inputs, *text, EOD]
    learnt += [not has_inputs] * len(inputs) + [True] * (len(text) + 1)
  assert len(tokens) == len(every)
  start = data.draw(st.integers(0, len(every)))
  stop = data.draw(st.integers(start, len(every)))
  read, is_target = tokens.read(start, stop)
  assert read.tolist() == every[start:stop]
  assert is_target.tolist() == learnt[start:stop]
  assert (read.dtype, is_target.dtype) == (np.int32, np.bool_)


@hypothesis.given(_shards, st.booleans())
@repeatable(200)
def test_spans_say_where_every_document_and_its_targets_are(shards, has_inputs):
  tokens = token_array(*shards, has_inputs=has_inputs)
  expected, end = [], 0
  for inputs, text in list(itertools.chain(*shards)):
    begin, end = end, end + len(inputs) + len(text) + 1
    targets = begin + len(inputs) if has_inputs else begin
    expected.append([begin, targets, end])
  assert tokens.spans().tolist() == expected
  # Any of them, in any order.
  numbers = np.arange(len(expected))[::-1].repeat(2)
  begins, ends = tokens.extents(numbers)
  assert begins.tolist() == [expected[n][0] for n in numbers]
  assert ends.tolist() == [expected[n][2] for n in numbers]


def test_no_tokens_at_all_read_as_none():
  tokens = TokenArray([Shard(np.empty(0, "<u2"), np.empty([2, 0], np.int64))])
  assert (len(tokens), tokens.has_inputs) == (0, False)
  assert tokens.read(0, 0)[0].size == 0
  assert tokens.spans().shape == (0, 3)


@pytest.mark.parametrize("has_inputs", [True, False])
def test_examples_are_told_from_documents(has_inputs):
  tokens = token_array([([5], [6])], [], has_inputs=has_inputs)
  assert tokens.has_inputs == has_inputs


def test_reading_a_part_reads_no_more_than_that_part():
  class Counting(np.ndarray):
    read = 0

    def __getitem__(self, item):
      part = super().__getitem__(item)
      Counting.read += part.size
      return part

  documents = np.array([[0], [1000]])
  shards = [
    Shard(np.ones(1000, "<u2").view(Counting), documents) for _ in range(100)
  ]
  TokenArray(shards).read(990, 1010)
  assert Counting.read == 20
