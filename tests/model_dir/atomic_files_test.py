# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import errno
import os
import pathlib

import numpy as np
import pytest

from palm_mtf.errors import UserError
from palm_mtf.model_dir import atomic_files
from palm_mtf.model_dir.atomic_files import (
  check_model_dir,
  new_path,
  write_atomically,
  writing,
)
from tests.refusals import message_of


def test_a_file_is_replaced_as_a_whole(tmp_path):
  path = tmp_path / "deep" / "file"
  write_atomically(str(path), b"one")
  with open(path, "rb") as old:
    write_atomically(str(path), b"other")
    assert old.read() == b"one"
  assert path.read_bytes() == b"other"
  assert os.listdir(path.parent) == ["file"]


def test_a_file_that_is_there_stays_if_it_is_not_to_be_replaced(
  tmp_path, monkeypatch
):
  path = tmp_path / "file"
  for content in (b"one", b"other"):
    write_atomically(str(path), content, replaces=False)
    assert path.read_bytes() == b"one"
  assert os.listdir(tmp_path) == ["file"]

  def refuse(source, target):
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

  monkeypatch.setattr(os, "link", refuse)  # as on a mounted bucket
  write_atomically(str(tmp_path / "new"), b"new", replaces=False)
  assert (tmp_path / "new").read_bytes() == b"new"


def test_a_link_to_a_file_stays_one(tmp_path):
  target = tmp_path / "disk" / "metrics"
  link = tmp_path / "link"
  link.symlink_to(target)
  for content in (b"one", b"other"):
    write_atomically(str(link), content)
    assert target.read_bytes() == content and link.is_symlink()


def test_what_a_killed_writer_left_is_removed_once_no_writer_can_need_it(
  tmp_path,
):
  old, new, others = (
    tmp_path / f".partial_{name}" for name in ("[1]_a", "[1]_b", "other_a")
  )
  for path in (old, new, others):
    path.touch()
  for path in (old, others):
    os.utime(path, (0, 0))
  write_atomically(str(tmp_path / "[1]"), b"")
  assert {*tmp_path.iterdir()} == {new, others, tmp_path / "[1]"}


def test_what_a_killed_export_left_is_removed_unless_a_file_in_it_is_new(
  tmp_path,
):
  old, new = (tmp_path / f".partial_folder_{name}" for name in "ab")
  for path in (old, new):
    (path / "below").mkdir(parents=True)
    (path / "below" / "file").touch()
    os.utime(path, (0, 0))
  os.utime(old / "below" / "file", (0, 0))
  with new_path(str(tmp_path / "folder"), 0) as temporary:
    os.mkdir(temporary)
  assert {*tmp_path.iterdir()} == {new, tmp_path / "folder"}


def test_files_and_folders_have_the_rights_of_any_other(tmp_path):
  write_atomically(str(tmp_path / "file"), b"")
  with new_path(str(tmp_path / "folder"), 0) as temporary:
    os.mkdir(temporary)
  (tmp_path / "other").touch()
  (tmp_path / "others").mkdir()
  for ours, other in (("file", "other"), ("folder", "others")):
    assert (tmp_path / ours).stat().st_mode == (tmp_path / other).stat().st_mode


def test_a_file_below_a_folder_is_on_the_disk_before_the_folder_has_its_name(
  tmp_path, monkeypatch
):
  synced = []
  monkeypatch.setattr(
    atomic_files, "sync", lambda path: synced.append(os.path.basename(path))
  )
  with new_path(str(tmp_path / "folder"), 0) as temporary:
    os.makedirs(os.path.join(temporary, "below"))
    pathlib.Path(temporary, "below", "file").touch()
    assert not (tmp_path / "folder").exists()
  assert synced[:2] == ["file", "below"]
  assert os.listdir(tmp_path) == ["folder"]
  assert os.listdir(tmp_path / "folder" / "below") == ["file"]


def test_a_file_that_is_written_in_pieces_appears_when_it_is_on_the_disk(
  tmp_path, monkeypatch
):
  path, synced = tmp_path / "file", []
  monkeypatch.setattr(
    atomic_files, "sync", lambda path: synced.append(os.listdir(tmp_path))
  )
  with new_path(str(path), 0) as temporary:
    pathlib.Path(temporary).write_text("text")
    assert not path.exists()
  assert path.read_text() == "text"
  assert synced[0] == [os.path.basename(temporary)]
  assert os.listdir(tmp_path) == ["file"]


@pytest.mark.parametrize("make", [pathlib.Path.touch, pathlib.Path.mkdir])
def test_a_failure_leaves_nothing(tmp_path, make):
  with pytest.raises(ZeroDivisionError), new_path(str(tmp_path / "a"), 0) as x:
    make(pathlib.Path(x))
    _ = 1 // 0
  assert os.listdir(tmp_path) == []


def test_a_failure_leaves_no_folder_above_that_was_made_for_it(tmp_path):
  (tmp_path / "old").mkdir()
  path = tmp_path / "old" / "new" / "newer" / "a"
  with pytest.raises(ZeroDivisionError), new_path(str(path), 0):
    assert path.parent.is_dir()
    raise ZeroDivisionError
  assert not any((tmp_path / "old").iterdir())
  with pytest.raises(ZeroDivisionError), new_path(str(path), 0):
    (path.parent.parent / "of_another_program").touch()
    raise ZeroDivisionError
  assert [x.name for x in path.parent.parent.iterdir()] == [
    "of_another_program"
  ]


@pytest.mark.parametrize(
  ("number", "message"),
  [
    (
      errno.EDQUOT,
      "no disk space left for /some/run, which needs up to 12,345 bytes; free "
      "some, or choose another folder.",
    ),
    (
      errno.EROFS,
      "cannot write /some/run: Read-only file system; choose another folder.",
    ),
  ],
)
def test_what_the_disk_refuses_is_told_with_the_folder(number, message):
  with pytest.raises(UserError) as info, writing("/some/run", 12345):
    raise OSError(number, os.strerror(number))
  assert str(info.value) == message


def test_an_error_without_errno_is_told_by_its_text():
  with (
    pytest.raises(UserError, match="cannot write /some/file: the pipe is bl"),
    writing("/some/file", 12345),
  ):
    raise OSError("the pipe is blocked")
  with pytest.raises(UserError) as info, writing("/some/file", 12345):
    with open("/dev/full", "wb") as full:
      np.zeros(100_000).tofile(full)
  assert str(info.value).startswith("no disk space left for /some/file, which")


@pytest.mark.parametrize(
  "model_dir, message",
  [
    (5, "MODEL_DIR = 5: give the path of a folder, such as '\"runs/first\"'."),
    ("", "MODEL_DIR = '': give the path of a folder"),
    ("~/runs/a", "MODEL_DIR = '~/runs/a': give the whole path, such as '/"),
    ("gs://bucket/run", "MODEL_DIR = 'gs://bucket/run': is an address, and"),
    (__file__, f"MODEL_DIR = {__file__!r}: is a file; give a folder."),
  ],
)
def test_model_dir_that_is_no_folder_and_cannot_become_one_is_refused(
  model_dir, message, tmp_path
):
  check_model_dir(str(tmp_path / "not" / "yet"))
  check_model_dir(str(tmp_path))
  assert message in message_of(check_model_dir, model_dir)
