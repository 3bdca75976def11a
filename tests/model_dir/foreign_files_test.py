# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Only regular files of a bounded size are read, and none is waited for."""

import os

import pytest

from palm_mtf.model_dir.foreign_files import check_regular, read_regular


def test_a_regular_file_is_read_up_to_the_limit(tmp_path):
  path = tmp_path / "a"
  path.write_bytes(b"12345")
  (tmp_path / "link").symlink_to(path)
  assert check_regular(str(path)) == 5
  assert read_regular(str(tmp_path / "link"), 5) == b"12345"
  with pytest.raises(OSError, match="at most 4 are read"):
    read_regular(str(path), 4)


def test_a_file_whose_size_is_not_known_is_read_up_to_the_limit():
  assert read_regular("/proc/self/status", 100_000)
  with pytest.raises(OSError, match="at most 4 are read"):
    read_regular("/proc/self/status", 4)


@pytest.mark.parametrize(
  "make, reason",
  [
    (os.mkfifo, "is a FIFO, not a regular file"),
    (os.mkdir, "Is a directory"),
    (lambda path: os.symlink("/dev/zero", path), "is a device, not a regular"),
    (lambda path: os.symlink("nowhere", path), "No such file"),
  ],
)
def test_what_is_no_regular_file_is_refused(make, reason, tmp_path):
  path = str(tmp_path / "a")
  make(path)
  with pytest.raises(OSError, match=reason):
    read_regular(path, 5)
