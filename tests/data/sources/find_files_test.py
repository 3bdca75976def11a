# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import os
import tempfile

import pytest

from palm_mtf.data.sources.find_files import find_files
from palm_mtf.errors import UserError


def error(*globs) -> str:
  with pytest.raises(UserError) as info:
    find_files(globs)
  assert "\n" not in str(info.value)
  return str(info.value)


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
  assert "matches no file" in error("{stdlib}/**/p.txt")
  # A glob that names such a folder itself means it.
  assert len(find_files([f"{tree}/deep/**/*.txt"])) == 3


def test_the_default_glob_finds_the_running_library():
  names = {os.path.basename(f.path) for f in find_files(["{stdlib}/**/*.py"])}
  assert {"argparse.py", "typing.py"} <= names
  assert "pytest.py" not in names


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
  "": A_FOLDER,
  "/": A_FOLDER,
}


@pytest.mark.parametrize("glob", WHY)
def test_a_glob_without_files_is_an_error_that_says_why(tree, glob):
  message = f"TEXT_FILES = '{tree}{glob}': {WHY[glob].format(tree)}"
  assert error(f"{tree}{glob}") == error(f"{tree}/*.txt", f"{tree}{glob}")
  assert error(f"{tree}{glob}") == message


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


def test_brackets_that_match_nothing_are_explained(tree):
  assert error(f"{tree}/[0-9]") == (
    f"TEXT_FILES = '{tree}/[0-9]': matches no file; the folder {tree} exists, "
    "but holds no such file; write [[] for a bracket of a name."
  )


def test_what_is_no_file_is_named(tmp_path):
  pipe, link = tmp_path / "pipe", tmp_path / "link"
  os.mkfifo(pipe)
  link.symlink_to("nothing")
  for path in (pipe, link, "/dev/zero"):
    assert error(str(path)) == (
      f"TEXT_FILES = '{path}': {path} is a pipe, a device or a link to "
      "nothing, and text is read more than once; give a file."
    )


def test_all_files_empty_is_an_error(tmp_path):
  for name in "ab":
    (tmp_path / name).touch()
  assert f"all 2 files are empty, such as {tmp_path}/a" in error(
    f"{tmp_path}/*"
  )


@pytest.mark.parametrize("compression", ["", ".gz", ".GZ", ".bz2", ".xz"])
@pytest.mark.parametrize(
  ("name", "is_json_lines"),
  [
    ("a.txt", False),
    ("a.json", False),
    ("jsonl", False),
    ("a.jsonl", True),
    ("a.JSONL", True),
    ("a.jsonl.gz.txt", False),
  ],
)
def test_the_suffix_says_what_a_file_is(
  tmp_path, name, compression, is_json_lines
):
  (tmp_path / f"{name}{compression}").write_text("text")
  (file,) = find_files(f"{tmp_path}/*")
  assert file.compression == compression.lower()
  assert file.is_json_lines == is_json_lines


@pytest.mark.parametrize("suffix", [".zst", ".lz4", ".lzma", ".br"])
def test_another_compression_is_named_with_those_that_are_read(
  tmp_path, suffix
):
  (tmp_path / f"a.jsonl{suffix}").write_bytes(b"packed")
  assert error(f"{tmp_path}/*") == (
    f"TEXT_FILES: {tmp_path}/a.jsonl{suffix}: this compression is not "
    "supported, only .gz, .bz2, .xz; compress the text in one of these, or "
    "leave the file out."
  )


def test_a_message_calls_the_setting_as_the_user_does(tmp_path):
  with pytest.raises(UserError, match=r"^books.files = '.*/x': matches no"):
    find_files(f"{tmp_path}/x", "books.files")


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
      assert error(f"{folder}/*.txt") == (
        f"TEXT_FILES: {file} may not be read; change its permissions, or give "
        "a glob that leaves it out."
      )
      assert f"the folder {secret} may not be read" in error(f"{secret}/*.txt")
    finally:
      if is_root:
        os.setresuid(0, 0, 0)
      os.chmod(secret, 0o755)
