# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache reads what this user wrote, and nothing else."""

import os
import signal
import stat

import pytest

from palm_mtf.machine import cache_folder
from palm_mtf.machine.cache_folder import (
  CacheError,
  cache_path,
  open_cache,
  partial_folder,
  read_cached,
  write_cached,
)
from tests import processes

_DIES_WHILE_IT_WRITES = """
import os, sys
from palm_mtf.machine.cache_folder import open_cache, partial_folder
with open_cache(sys.argv[1]) as cache, partial_folder(cache.descriptor):
  os.kill(os.getpid(), 9)
"""
NAME, CONTENT = "library.so", b"content" * 1000


@pytest.fixture
def caches(tmp_path, monkeypatch):
  monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
  return tmp_path


@pytest.fixture
def folder(caches):
  """The path of a folder of the cache with one sealed file."""
  path = caches / "palm_mtf" / "kind" / "key"
  with open_cache(str(path), make=True) as cache:
    cache.keep(NAME, CONTENT)
  return path


@pytest.fixture
def become_another_user(monkeypatch):
  return lambda: monkeypatch.setattr(os, "geteuid", lambda: 12345)


def load(folder):
  with open_cache(str(folder)) as cache:
    return cache.load(cache.names())


@pytest.mark.parametrize("umask", [0, 0o002, 0o077, 0o777])
def test_every_folder_is_made_for_this_user_alone_whatever_the_umask(
  umask, tmp_path
):
  top = tmp_path / "new" / "caches"
  before = os.umask(umask)
  try:
    write_cached(f"{top}/palm_mtf/kind/key/{NAME}", CONTENT)
  finally:
    os.umask(before)
  made = [top.parent, top, *top.rglob("*")]
  modes = {stat.S_IMODE(x.stat().st_mode) for x in made if x.is_dir()}
  assert modes == {0o700}
  (file,) = (x for x in made if x.is_file())
  assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("given", ["", "caches", "./caches", None])
def test_a_relative_xdg_cache_home_is_ignored(given, tmp_path, monkeypatch):
  monkeypatch.setenv("HOME", str(tmp_path))
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  if given is not None:
    monkeypatch.setenv("XDG_CACHE_HOME", given)
  assert cache_path("kind").startswith(f"{tmp_path}/.cache/palm_mtf/kind/")


def test_without_an_absolute_home_there_is_no_cache(monkeypatch):
  monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
  monkeypatch.setenv("HOME", "relative")
  with pytest.raises(CacheError, match="HOME is no absolute path"):
    write_cached(cache_path("kind"), b"")
  assert not os.path.exists("relative")


def test_a_folder_of_another_user_is_not_read(folder, become_another_user):
  become_another_user()
  with pytest.raises(CacheError, match="palm_mtf belongs to another user"):
    load(folder)


def test_nothing_is_made_in_the_home_of_another_user(
  tmp_path, become_another_user
):
  """With sudo, root has the user's home; the user could not remove files."""
  if not tmp_path.stat().st_uid:
    os.chown(tmp_path, 54321, -1)
  become_another_user()
  for top in (tmp_path, tmp_path / ".cache"):
    with pytest.raises(CacheError, match=f"{tmp_path} belongs to another user"):
      write_cached(f"{top}/palm_mtf/kind/{NAME}", CONTENT)
  assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(os.geteuid() != 0, reason="gives folders to another user")
@pytest.mark.parametrize("level", ["palm_mtf", "palm_mtf/kind", "key", "file"])
def test_each_level_has_to_belong_to_this_user(level, folder):
  path = {"key": folder, "file": folder / NAME}.get(
    level, folder.parent.parent.parent / level
  )
  os.chown(path, 65534, -1)
  if level == "file":
    assert load(folder) == {}
  else:
    with pytest.raises(CacheError, match=f"{path} belongs to another user"):
      load(folder)


@pytest.mark.parametrize("level", [0, 1, 2])
def test_others_lose_the_right_to_write_to_a_folder_before_it_is_read(
  level, folder
):
  path = [folder, *folder.parents][level]
  path.chmod(0o777)
  assert load(folder) == {NAME: CONTENT}
  assert stat.S_IMODE(path.stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_may_write_is_not_read(mode, folder, caplog):
  (folder / NAME).chmod(mode)
  assert load(folder) == {}
  assert not [*folder.iterdir()]  # it is compiled again
  assert NAME in caplog.text


def test_no_link_is_followed(folder, tmp_path):
  elsewhere = tmp_path / "elsewhere"
  (folder / NAME).rename(elsewhere)
  (folder / NAME).symlink_to(elsewhere)
  assert load(folder) == {}
  folder.rename(tmp_path / "moved")
  folder.symlink_to(tmp_path / "moved")
  with pytest.raises(CacheError, match="key is a link or a file; set XDG"):
    load(folder)


def make_folder(path):
  path.unlink()
  (path / "within").mkdir(parents=True)


def make_pipe(path):
  path.unlink()
  os.mkfifo(path)


@pytest.mark.parametrize(
  "damage",
  [
    lambda path: os.truncate(path, 4096),
    lambda path: os.truncate(path, 1),
    lambda path: os.truncate(path, 0),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    lambda path: path.write_bytes(b"\x7fELF" + os.urandom(9000)),
    lambda path: path.write_bytes(path.read_bytes().replace(b"t", b"u", 1)),
    lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    make_folder,
    make_pipe,
  ],
  ids="cut one_byte empty zeros garbage flipped longer folder pipe".split(),
)
def test_what_was_not_written_there_is_removed_and_can_be_written_again(
  damage, folder, caplog
):
  damage(folder / NAME)
  assert load(folder) == {}
  assert not [*folder.iterdir()]
  assert (
    f"not what this user wrote there, removed and compiled again: {NAME}"
    in caplog.text
  )
  with open_cache(str(folder)) as cache:
    cache.keep(NAME, CONTENT)
  assert load(folder) == {NAME: CONTENT}


def test_a_whole_file_under_another_name_is_not_read(folder):
  (folder / NAME).rename(folder / "newer.so")
  assert load(folder) == {}


def test_a_killed_writer_leaves_nothing_for_ever(folder):
  child = processes.python("-c", _DIES_WHILE_IT_WRITES, folder)
  assert child.returncode == -signal.SIGKILL, child.stderr
  (left,) = (x for x in folder.iterdir() if x.name != NAME)
  os.utime(left, (0, 0))  # as if the process had been killed long ago
  with open_cache(str(folder)) as cache:
    with partial_folder(cache.descriptor), partial_folder(cache.descriptor):
      # The killed process's folder is gone; the folders in use are not.
      assert len([*folder.iterdir()]) == 3
  assert [x.name for x in folder.iterdir()] == [NAME]


def test_only_the_newest_files_are_kept_and_no_partial_one(folder):
  os.utime(folder / NAME, (0, 0))
  with open_cache(str(folder), make=True) as cache:
    partial = folder / ".palm_mtf_partial_x"
    partial.touch()
    os.utime(partial, (1, 1))
    for i, name in enumerate("abcd", start=1):
      cache.keep_newest(name, b"content", 5)
      os.utime(folder / name, (i, i))
    cache.keep_newest("e", b"content", 3)
    assert {*os.listdir(folder)} == {"e", "d", "c"}


def test_the_files_written_first_make_room(folder, monkeypatch):
  monkeypatch.setattr(cache_folder, "_MAX_BYTES", 2 * len(CONTENT) + 100)
  with open_cache(str(folder)) as cache:
    for i in range(3):
      cache.keep(f"{i}.so", CONTENT)
      os.utime(folder / f"{i}.so", (i, i))
  os.utime(folder / NAME, (9, 9))
  assert load(folder).keys() == {NAME, "2.so"}
  assert {x.name for x in folder.iterdir()} == {NAME, "2.so"}


def test_a_file_that_is_refused_is_like_none_and_one_line_says_so(
  folder, become_another_user, caplog
):
  path = str(folder / NAME)
  assert read_cached(f"{path}.other") is None
  assert not caplog.messages
  become_another_user()
  assert read_cached(path) is None
  assert read_cached(path) is None
  (line,) = caplog.messages
  assert "palm_mtf belongs to another user; set XDG_CACHE_HOME" in line
