# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import itertools
import os
import re
import resource
from pathlib import Path

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from palm_mtf.data.sources.document import (
  TRAIN,
  VALIDATION,
  Document,
  num_repeats,
)
from palm_mtf.data.tokens.encoder import EncodedDocument
from palm_mtf.data.tokens.shard import (
  Counts,
  DamagedShardError,
  Shard,
  TokenArray,
  check_shard,
  map_array,
  map_shard,
  write_shard,
)
from palm_mtf.errors import UserError
from tests.data.small_sources import (
  EOD,
  examples,
  repeatable,
  shard,
  token_array,
)


def encoded(inputs, text, split=TRAIN, weight=1.0) -> EncodedDocument:
  ids = [np.array(each, np.int32) for each in (inputs, text)]
  document = Document(
    " ".join(map(str, text)), " ".join(map(str, inputs)), weight
  )
  return EncodedDocument(split, document, *ids)


def write(folder, documents, *, number=0, dtype="<u2", has_inputs=True):
  return write_shard(
    str(folder),
    number,
    documents,
    dtype=dtype,
    eod_id=EOD,
    has_inputs=has_inputs,
  )


_documents = st.lists(
  st.builds(
    lambda example, split, weight: encoded(*example, split, weight),
    examples(6),
    st.sampled_from([TRAIN, VALIDATION]),
    st.sampled_from([0.0, 0.3, 1.0, 2.5]),
  ),
  min_size=1,
  max_size=8,
)


@hypothesis.given(_documents, st.booleans(), st.sampled_from(["<u2", "<u4"]))
@repeatable(30)
def test_a_shard_is_its_documents_in_order_repeated_by_weight(
  tmp_path_factory, documents, has_inputs, dtype
):
  folder = tmp_path_factory.mktemp("shard")
  summary = write(folder, documents, has_inputs=has_inputs, dtype=dtype)
  assert check_shard(str(folder), 0, reads=True) == summary
  assert summary.num_read == len(documents)
  assert summary.lowest_rank == min(d.document.rank for d in documents)
  for split in (TRAIN, VALIDATION):
    expected, counts = [], Counts()
    for one in documents:
      repeats = num_repeats(one.document) if one.split == split else 0
      if split == VALIDATION:  # held out once, or not at all
        repeats = min(repeats, 1)
      expected += [(one.inputs.tolist(), one.text.tolist())] * repeats
      length = len(one.inputs) + len(one.text) + 1
      for _ in range(repeats):
        counts += Counts(
          num_documents=1,
          num_tokens=length,
          num_target_tokens=len(one.text) + 1,
          num_bytes=len(one.document.text) + len(one.document.inputs),
          num_target_bytes=len(one.document.text),
          longest_document_tokens=length,
        )
    mapped = map_shard(str(folder), 0, split, summary)
    by_hand = shard(expected, has_inputs=True)
    assert mapped.tokens.tolist() == by_hand.tokens.tolist()
    assert mapped.tokens.dtype == np.dtype(dtype)
    assert summary.counts[split] == counts
    assert mapped.documents.tolist() == by_hand.documents.tolist()
    assert summary.has_inputs == mapped.has_inputs == has_inputs


def test_no_document_writes_no_file(tmp_path):
  assert write(tmp_path, []).num_read == 0
  assert os.listdir(tmp_path) == []


def test_files_are_what_numpy_reads(tmp_path):
  write(tmp_path, [encoded([5], [6, 7])])
  assert np.load(tmp_path / "train-00000.npy").tolist() == [5, 6, 7, EOD]
  assert np.load(tmp_path / "train-00000.documents.npy").tolist() == [[1], [4]]


@pytest.fixture
def folder(tmp_path):
  """A folder with one shard of both splits."""
  documents = [encoded([9] * i, [8] * 5) for i in range(20)]
  documents += [encoded([2], [3], VALIDATION)] * 5
  write(tmp_path, documents)
  return tmp_path


FILES = [
  "shard-00000.json",
  *(
    f"{split}-00000{kind}.npy"
    for split in (TRAIN, VALIDATION)
    for kind in ("", ".documents")
  ),
]


DAMAGES = {
  "cut short": lambda content: content[:-1],
  "appended": lambda content: content + b"\0",
  "empty": lambda content: b"",
  "one bit": lambda content: content[:-1] + bytes([content[-1] ^ 1]),
  "removed": None,
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("reads", [True, False])
def test_every_damage_is_found_and_the_file_is_named(
  folder, damage, name, reads
):
  if (damage, name) == ("appended", FILES[0]):
    return  # fuzz_test.py changes its content
  path, why = folder / name, "its content is not what was written"
  if damage == "removed":
    path.unlink()
    why = "No such file or directory"
  else:
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
  if damage == "one bit" and name != FILES[0] and not reads:
    check_shard(str(folder), 0, reads=False)  # its size is right
    return
  with pytest.raises(DamagedShardError) as info:
    check_shard(str(folder), 0, reads=reads)
  assert str(info.value) == f"{path}: {why}"


def test_a_weight_that_no_memory_holds_is_an_error_before_it_fills(tmp_path):
  document = encoded([], [5] * 100, weight=1e7)
  with pytest.raises(UserError, match="a document of 199 bytes has weight 1e"):
    write(tmp_path, [document])


def test_a_file_that_cannot_be_read_is_not_called_damaged(tmp_path):
  """The file may be whole, so no other file replaces it."""
  write(tmp_path, [encoded([1], [2, 3])])
  path = tmp_path / "train-00000.npy"
  path.unlink()
  path.mkdir()  # a folder, which not even the superuser can read as a file
  for reads in (True, False):
    with pytest.raises(UserError, match=f"^cannot read {path}: Is a dir"):
      check_shard(str(tmp_path), 0, reads=reads)


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
@repeatable(60)
def test_reading_across_shards_is_a_slice_of_all_of_them(
  shards, data, has_inputs
):
  tokens = token_array(*shards, has_inputs=has_inputs)
  every, learned, expected = [], [], []
  for inputs, text in list(itertools.chain(*shards)):
    begin, targets = len(every), len(every) + len(inputs) * has_inputs
    every += [*inputs, *text, EOD]
    learned += [not has_inputs] * len(inputs) + [True] * (len(text) + 1)
    expected.append([begin, targets, len(every)])
  assert len(tokens) == len(every)
  start = data.draw(st.integers(0, len(every)))
  stop = data.draw(st.integers(start, len(every)))
  read, is_target = tokens.read(start, stop)
  assert read.tolist() == every[start:stop]
  assert is_target.tolist() == learned[start:stop]
  assert (read.dtype, is_target.dtype) == (np.int32, np.bool_)
  assert tokens.spans().tolist() == expected
  # Any of them, in any order.
  numbers = np.arange(len(expected))[::-1].repeat(2)
  begins, ends = tokens.extents(numbers)
  assert begins.tolist() == [expected[n][0] for n in numbers]
  assert ends.tolist() == [expected[n][2] for n in numbers]


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
