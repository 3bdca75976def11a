# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import json
import os
import tempfile
import time
import types

import pytest

from palm_mtf.data.sources import files
from palm_mtf.data.sources.files import FileDigests, describe_shards, find_files
from palm_mtf.errors import UserError
from tests.refusals import message_of


@pytest.fixture
def tree(tmp_path):
  for name in ("b.txt", "a.txt", "deep/er/c.txt", "deep/d.md"):
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(name)
  return tmp_path


def test_files_are_sorted_and_each_is_found_once_by_several_globs(tree):
  files = find_files([f"{tree}/**/*.txt", f"{tree}/*", f"{tree}/b.txt"])
  names = [os.path.relpath(file.path, tree) for file in files]
  assert names == ["a.txt", "b.txt", "deep/er/c.txt"]
  assert [file.num_bytes for file in files] == [5, 5, 13]


def test_relative_globs_start_in_the_current_folder(tree, monkeypatch):
  monkeypatch.chdir(tree)
  assert [f.path for f in find_files(["*.txt"])] == [
    str(tree / "a.txt"),
    str(tree / "b.txt"),
  ]


def test_what_is_installed_in_the_standard_library_is_not_even_walked_through(
  tree, monkeypatch
):
  for name in ("site-packages/p.txt", "x/dist-packages/p.txt"):
    path = tree / "deep" / name
    path.parent.mkdir(parents=True)
    path.write_text("installed")
  monkeypatch.setattr(
    "sysconfig.get_path", {"stdlib": str(tree / "deep")}.__getitem__
  )
  walked, scandir = [], os.scandir

  def watched(folder):
    walked.append(str(folder))
    return scandir(folder)

  monkeypatch.setattr("os.scandir", watched)
  files = find_files(["{stdlib}/**/*.txt"])
  assert [f.path for f in files] == [str(tree / "deep/er/c.txt")]
  assert str(tree / "deep/er") in walked
  assert not [x for x in walked if "site-packages" in x]
  assert "matches no file" in message_of(find_files, "{stdlib}/**/p.txt")
  # A glob that names such a folder finds files in it.
  assert len(find_files([f"{tree}/deep/**/*.txt"])) == 3


A_FOLDER = "a folder; give a glob of the files in it, such as '{}/**/*.txt'."
WHY = {
  "/deeep/x/**/*.txt": 'no folder {0}/deeep (did you mean "deep"?); the '
  "nearest that exists is {0}.",
  "/deep/**/*.rst": "matches no file; the folder {}/deep exists, but holds no "
  "such file.",
  "/aa.txt": "matches no file; the folder {} exists, but holds no such file "
  '(did you mean "a.txt"?).',
  "/d*": "matches folders only; give a glob of the files in them, such as "
  "'{}/d/**/*.txt'.",
  "/[0-9]": "matches no file; the folder {} exists, but holds no such file; "
  "write [[] for a bracket of a name.",
  "": A_FOLDER,
  "/": A_FOLDER,
}


@pytest.mark.parametrize("glob", WHY)
def test_a_glob_without_files_is_an_error_that_says_why(tree, glob):
  globs = [f"{tree}{glob}"]
  message = f"TEXT_FILES = '{globs[0]}': {WHY[glob].format(tree)}"
  assert message_of(find_files, globs) == message
  assert message_of(find_files, [f"{tree}/*.txt", *globs]) == message


@pytest.mark.parametrize(
  ("folder", "name"),
  [("data [v2]", "a.txt"), ("[ab]", "[x].txt"), ("d[", "a].txt"), ("*", "a")],
)
def test_a_path_that_exists_is_taken_as_it_is_written(tmp_path, folder, name):
  path = tmp_path / folder / name
  path.parent.mkdir()
  path.write_text("text")
  for glob in (path, path.parent / "*", path.parent / "**" / "*"):
    assert [file.path for file in find_files(str(glob))] == [str(path)]


def test_a_glob_that_matches_is_no_path(tmp_path):
  for name in ("a[1].txt", "a1.txt"):
    (tmp_path / name).write_text("text")
  (file,) = find_files(f"{tmp_path}/a[1].txt")
  assert file.path == f"{tmp_path}/a1.txt"
  (file,) = find_files(f"{tmp_path}/a[[]1].txt")
  assert file.path == f"{tmp_path}/a[1].txt"


def test_what_is_no_file_is_named(tmp_path):
  pipe, link = tmp_path / "pipe", tmp_path / "link"
  os.mkfifo(pipe)
  link.symlink_to("nothing")
  for path in (pipe, link, "/dev/zero"):
    assert message_of(find_files, str(path)) == (
      f"TEXT_FILES = '{path}': {path} is a pipe, a device or a link to "
      "nothing, and text is read more than once; give a file."
    )


def test_what_may_not_be_read_is_named():
  with tempfile.TemporaryDirectory() as folder:
    os.chmod(folder, 0o755)
    file, secret = f"{folder}/secret.txt", f"{folder}/secret"
    with open(file, "w") as opened:
      opened.write("text")
    os.chmod(file, 0)
    os.mkdir(secret, mode=0)
    is_root = os.geteuid() == 0
    try:
      if is_root:  # who may read anything
        os.setresuid(65534, 65534, 0)
      message = message_of(find_files, f"{folder}/*.txt")
      assert message == (
        f"TEXT_FILES: {file} may not be read; change its permissions, or give "
        "a glob that leaves it out."
      )
      message = message_of(find_files, f"{secret}/*.txt")
      assert f"the folder {secret} may not be read" in message
    finally:
      if is_root:
        os.setresuid(0, 0, 0)
      os.chmod(secret, 0o755)


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
  monkeypatch.setattr(files, "time", later)
  return folder


def read(folder, kept) -> list[str]:
  with FileDigests(str(kept)) as digests:
    return digests.read(find_files(f"{folder}/*"))


def test_a_file_that_nobody_touched_is_not_read_again(
  folder, tmp_path, monkeypatch
):
  kept = tmp_path / "cache" / "digests.json"
  first = read(folder, kept)
  written = kept.stat().st_mtime_ns
  monkeypatch.setattr(files, "hash_file", None)
  assert read(folder, kept) == first
  assert kept.stat().st_mtime_ns == written


@pytest.mark.parametrize(
  ("text", "time", "is_new"),
  [
    ("TEXT A", 10**18 + 1, False),
    ("longer text", 10**18, False),
    # `tar`, `cp -p` and `rsync -t` set mtime back; the file system's own times
    # or the file's inode show the change.
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
  os.utime(folder / "a", ns=(0, files.time.time_ns()))
  read(folder, tmp_path / "digests.json")
  kept = json.loads((tmp_path / "digests.json").read_text())
  assert [os.path.basename(path) for path in kept] == ["b"]


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
