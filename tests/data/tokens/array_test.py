# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mapped arrays equal NumPy's, and keep no file open."""

import itertools
import os
import re
import resource
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.tokens.array import Shard, TokenArray, map_array
from tests.data.small_sources import EOD, examples, repeatable, token_array


@pytest.mark.parametrize(
  "values",
  [
    np.arange(100_000, dtype=np.uint16),
    np.arange(60, dtype=np.int64).reshape(2, 30),
    np.empty([0], np.uint32),
    np.empty([2, 0], np.int64),
  ],
)
def test_an_array_has_the_values_that_numpy_reads_and_cannot_be_written(
  values, tmp_path
):
  path = str(tmp_path / "array.npy")
  np.save(path, values)
  mapped = map_array(path)
  os.unlink(path)  # as for a damaged file that is written again
  assert mapped.dtype == values.dtype
  np.testing.assert_array_equal(mapped, values, strict=True)
  if len(values.ravel()):
    with pytest.raises(ValueError, match="read-only"):
      mapped[..., 0] = 1


def test_more_arrays_than_a_process_may_have_files(tmp_path):
  path = str(tmp_path / "array.npy")
  np.save(path, np.arange(3))
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
  try:
    arrays = [map_array(path) for _ in range(300)]
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
  assert sum(int(x.sum()) for x in arrays) == 900


def test_memory_is_given_back_with_the_array(tmp_path):
  path = str(tmp_path / "array.npy")
  np.save(path, np.arange(3))

  def count():
    with open("/proc/self/maps") as maps:
      return sum(path in line for line in maps)

  part = map_array(path)[1:]
  assert count() == 1 and part.tolist() == [1, 2]
  del part
  assert count() == 0


def test_a_file_that_is_cut_short_is_an_error_and_no_signal(tmp_path):
  path = str(tmp_path / "array.npy")
  np.save(path, np.arange(3))
  os.truncate(path, 140)
  with pytest.raises(ValueError, match="is cut short"):
    map_array(path)


def test_random_reads_read_nothing_ahead(tmp_path):
  """Otherwise a kernel reads megabytes ahead for a document of 2 KB."""
  for name, is_random in (("ahead.npy", False), ("anywhere.npy", True)):
    path = tmp_path / name
    np.save(path, np.arange(10_000))
    values = map_array(str(path), is_random=is_random)
    assert values[9_999] == 9_999
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(path))
    flags = re.search(r"VmFlags: (.*)", mapping)[1].split()
    assert ("rr" in flags) == is_random


_shards = st.lists(st.lists(examples(), max_size=4), max_size=5)


@hypothesis.given(_shards, st.data(), st.booleans())
@repeatable(300)
def test_reading_across_shards_is_a_slice_of_all_of_them(
  shards, data, has_inputs
):
  tokens = token_array(*shards, has_inputs=has_inputs)
  every, learned = [], []
  for inputs, text in list(itertools.chain(*shards)):
    every += [*inputs, *text, EOD]
    learned += [not has_inputs] * len(inputs) + [True] * (len(text) + 1)
  assert len(tokens) == len(every)
  start = data.draw(st.integers(0, len(every)))
  stop = data.draw(st.integers(start, len(every)))
  read, is_target = tokens.read(start, stop)
  assert read.tolist() == every[start:stop]
  assert is_target.tolist() == learned[start:stop]
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
