# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Mapped arrays are NumPy's, and keep no file open."""

import os
import re
import resource
from pathlib import Path

import numpy as np
import pytest

from palm_mtf.data.tokens.mapped_file import map_array


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
  os.unlink(path)  # as for a damaged file that is written anew
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


def test_of_what_is_read_anywhere_nothing_is_read_ahead(tmp_path):
  """A kernel reads megabytes ahead of a page, for a document of 2 KB."""
  for name, is_random in (("ahead.npy", False), ("anywhere.npy", True)):
    path = tmp_path / name
    np.save(path, np.arange(10_000))
    values = map_array(str(path), is_random=is_random)
    assert values[9_999] == 9_999
    _, _, mapping = Path("/proc/self/smaps").read_text().partition(str(path))
    flags = re.search(r"VmFlags: (.*)", mapping)[1].split()
    assert ("rr" in flags) == is_random
