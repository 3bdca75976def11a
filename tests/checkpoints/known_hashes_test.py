# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A large file that did not change is hashed once; any change is noticed."""

import os
import time

import pytest

from palm_mtf.checkpoints import known_hashes
from palm_mtf.checkpoints.known_hashes import hash_unless_known
from palm_mtf.model_dir.foreign_files import hash_file

SIZE = known_hashes._LARGE_BYTES


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
  return tmp_path / "cache" / "palm_mtf" / "hashes"


@pytest.fixture
def file(tmp_path, monkeypatch):
  path = tmp_path / "weights"
  path.write_bytes(os.urandom(SIZE))
  # The file is as old as one of an earlier command.
  monkeypatch.setattr(known_hashes, "_SETTLED_SECS", 0.0)
  time.sleep(0.05)
  return path


@pytest.fixture
def read(monkeypatch):
  """The files that were hashed, in order."""
  found = []

  def hash_and_note(path):
    found.append(path)
    return hash_file(path)

  monkeypatch.setattr(known_hashes, "hash_file", hash_and_note)
  return found


def test_an_unchanged_file_is_read_once(file, read):
  hashes = {hash_unless_known(str(file)) for _ in range(3)}
  assert hashes == {hash_file(str(file))}
  assert read == [str(file)]


def test_a_changed_byte_is_noticed_though_size_and_time_are_as_before(file):
  before, status = hash_unless_known(str(file)), os.stat(file)
  with open(file, "r+b") as changed:
    changed.seek(SIZE // 2)
    byte = changed.read(1)[0]
    changed.seek(SIZE // 2)
    changed.write(bytes([byte ^ 1]))
  os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
  after = hash_unless_known(str(file))
  assert after == hash_file(str(file)) != before


def test_another_file_in_its_place_is_noticed(file, tmp_path):
  before = hash_unless_known(str(file))
  other = tmp_path / "other"
  other.write_bytes(bytes(SIZE))
  os.replace(other, file)
  assert hash_unless_known(str(file)) == hash_file(str(file)) != before


@pytest.mark.parametrize("damage", [b"", b"0" * 64, b"\0" * 3])
def test_a_damaged_note_is_ignored(file, read, cache, damage):
  found = hash_unless_known(str(file))
  (note,) = cache.iterdir()
  note.write_bytes(damage)
  assert hash_unless_known(str(file)) == found
  assert len(read) == 2


def test_a_file_that_may_still_change_is_not_noted(file, read, monkeypatch):
  monkeypatch.setattr(known_hashes, "_SETTLED_SECS", 3600.0)
  for _ in range(2):
    hash_unless_known(str(file))
  assert len(read) == 2


def test_only_the_newest_notes_are_kept(file, cache, monkeypatch):
  monkeypatch.setattr(known_hashes, "_MOST_KEPT", 2)
  for i in range(4):
    os.utime(file, ns=(i, i))
    hash_unless_known(str(file))
  assert len([*cache.iterdir()]) == 2


def test_without_a_cache_the_file_is_hashed(file, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # which is no folder
  assert hash_unless_known(str(file)) == hash_file(str(file))
