# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import hashlib
import json
import os
import time
import types

import pytest

from palm_mtf.data.sources import file_hashes
from palm_mtf.data.sources.file_hashes import FileDigests, describe_shards
from palm_mtf.data.sources.find_files import find_files
from palm_mtf.errors import UserError


@pytest.fixture
def folder(tmp_path, monkeypatch):
  """Two files that were written an hour ago."""
  folder = tmp_path / "text"
  folder.mkdir()
  for name in "ab":
    (folder / name).write_text(f"text {name}")
    os.utime(folder / name, ns=(0, 10**18))
  real = time.time_ns
  later = types.SimpleNamespace(time_ns=lambda: real() + 3600 * 10**9)
  monkeypatch.setattr(file_hashes, "time", later)
  return folder


def read(folder, kept) -> list[str]:
  with FileDigests(str(kept)) as digests:
    return digests.read(find_files(f"{folder}/*"))


def test_a_digest_is_the_hash_of_the_bytes(folder):
  digests = FileDigests().read(find_files(f"{folder}/*"))
  assert digests == [
    hashlib.blake2b(content, digest_size=16).hexdigest()
    for content in (b"text a", b"text b")
  ]


def test_a_file_that_nobody_touched_is_not_read_again(
  folder, tmp_path, monkeypatch
):
  kept = tmp_path / "cache" / "digests.json"
  first = read(folder, kept)
  written = kept.stat().st_mtime_ns
  monkeypatch.setattr(file_hashes, "hash_file", None)
  assert read(folder, kept) == first
  assert kept.stat().st_mtime_ns == written


@pytest.mark.parametrize(
  ("text", "time", "is_new"),
  [
    ("TEXT A", 10**18 + 1, False),
    ("longer text", 10**18, False),
    # As `tar`, `cp -p` and `rsync -t` set it back: the times of the file system
    # or the place of the file on the disk tell.
    ("TEXT A", 10**18, False),
    ("TEXT A", 10**18, True),
  ],
)
def test_another_size_or_time_or_a_time_set_back_is_read_again(
  folder, tmp_path, text, time, is_new
):
  first = read(folder, tmp_path / "digests.json")
  path = folder / "a"
  if is_new:
    path.rename(tmp_path / "before")
  path.write_text(text)
  os.utime(path, ns=(0, time))
  second = read(folder, tmp_path / "digests.json")
  assert second[0] != first[0]
  assert second[1] == first[1]


def test_a_file_that_was_written_just_now_is_not_kept(folder, tmp_path):
  (folder / "a").write_text("new")
  os.utime(folder / "a", ns=(0, file_hashes.time.time_ns()))
  read(folder, tmp_path / "digests.json")
  kept = json.loads((tmp_path / "digests.json").read_text())
  assert [os.path.basename(path) for path in kept] == ["b"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"/a": 3}', "\udce9"])
def test_a_damaged_file_of_digests_is_made_anew(folder, tmp_path, content):
  kept = tmp_path / "digests.json"
  kept.write_bytes(content.encode("utf-8", "surrogateescape"))
  assert read(folder, kept) == FileDigests().read(find_files(f"{folder}/*"))
  assert len(json.loads(kept.read_text())) == 2


def test_what_was_read_before_an_interrupt_is_kept(folder, tmp_path):
  kept = tmp_path / "digests.json"
  with pytest.raises(KeyboardInterrupt), FileDigests(str(kept)) as digests:
    digests.read(find_files(f"{folder}/a"))
    raise KeyboardInterrupt
  assert len(json.loads(kept.read_text())) == 1


def test_a_file_that_vanishes_is_named(folder):
  files = find_files(f"{folder}/*")
  (folder / "b").unlink()
  with pytest.raises(UserError, match="/b: No such file or directory"):
    FileDigests().read(files)


def test_shards_are_digests_of_local_files_and_names_of_others(folder):
  files = find_files(f"{folder}/*")
  shards = describe_shards([files[1].path, "gs://far/away"], None)
  assert shards == ["gs://far/away", FileDigests().read(files)[1]]
