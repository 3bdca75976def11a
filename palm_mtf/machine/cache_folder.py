# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The cache of this user, ~/.cache/palm_mtf; the CPU is part of each path.

A cached file is run as code or read as settings. Therefore nothing is read from
a folder or a file that belongs to another user or that another user may write.
Each folder below ~/.cache is opened relative to its open parent, so that a user
who may rename folders higher up cannot replace it between check and use.

A sealed file ends with the hash of its name and content, so that a truncated,
zero-filled or renamed file counts as missing. If the cache cannot be read or
written, commands work without it and log one line about it.
"""

import contextlib
import errno
import hashlib
import logging
import os
import shutil
import stat
import time
from collections.abc import Iterable, Iterator

from palm_mtf.machine.processors import cpu_flags, cpu_name, usable_cores

_logger = logging.getLogger(__name__)

# Version of the files of hardware rates, such as FLOP/s, that
# rates/calibration.py measures. Raise the version when the code that predicts
# runs uses the rates in another way, so that older files are not found.
CALIBRATION = 3

_NAME = "palm_mtf"
_PARTIAL = ".palm_mtf_partial_"  # prefix of incomplete files and folders
# Incomplete files unchanged for so long are removed: their writers were killed.
_ABANDONED_SECS = 3600.0
_MAX_BYTES = 2**26  # in memory: of one file, or of all files of a `load`
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
_FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
# O_NONBLOCK, because a pipe in place of the file would make open() wait.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
_SEAL_BYTES = hashlib.sha256().digest_size

_said: set[str] = set()  # warnings that this process has logged


class CacheError(Exception):
  """The cache cannot be used; the message is one line."""


def cache_path(kind: str, *key: str) -> str:
  """Returns a path in the folder `kind` of the cache.

  The path depends on this CPU and on `key`, the other strings on which the
  content depends.
  """
  # The XDG Base Directory Specification says to ignore relative paths.
  caches = os.environ.get("XDG_CACHE_HOME", "")
  if not os.path.isabs(caches):
    caches = os.path.expanduser("~/.cache")
  text = "\n".join((cpu_name(), *sorted(cpu_flags()), *key))
  digest = hashlib.sha256(text.encode()).hexdigest()
  return os.path.join(caches, _NAME, kind, digest[:16])


def measured_hardware() -> str:
  """Returns the path of the gin file with this machine's FLOP/s and bytes/s."""
  key = str(usable_cores()), f"calibration {CALIBRATION}"
  return cache_path("hardware", *key) + ".gin"


def warn_once(message: str) -> None:
  """Logs a warning, unless this process has already logged it."""
  if message not in _said:
    _said.add(message)
    _logger.warning(message)


def warn_of(error: CacheError) -> None:
  """Logs once that the cache is not used, and why."""
  warn_once(f"the cache is not used: {error}")


def read_cached(path: str) -> bytes | None:
  """Returns the content of a cached file; None if the file is missing.

  If the cache cannot be used, or another user may have written the file, logs a
  warning and returns None.
  """
  folder, name = os.path.split(path)
  try:
    with open_cache(folder) as cache:
      return cache.read(name)
  except FileNotFoundError:
    return None
  except CacheError as error:
    warn_of(error)
    return None


def write_cached(path: str, content: bytes) -> None:
  """Writes a file of the cache; raises CacheError if that fails."""
  folder, name = os.path.split(path)
  with open_cache(folder, make=True) as cache:
    cache.write(name, content)


@contextlib.contextmanager
def open_cache(path: str, *, make: bool = False) -> Iterator["CacheFolder"]:
  """Opens a folder of the cache; `path` is from `cache_path`.

  Raises FileNotFoundError if there is no such folder, and `make` is false.
  Raises CacheError if the folder belongs to another user, or cannot be opened.
  """
  top, _, below = path.rpartition(f"/{_NAME}/")
  if not os.path.isabs(top):
    raise CacheError("HOME is no absolute path; set XDG_CACHE_HOME to a folder")
  with contextlib.ExitStack() as stack:
    here = top
    try:
      if make:
        _make_top(top)
      folder = os.open(top, os.O_PATH | os.O_DIRECTORY)
      stack.callback(os.close, folder)
      for name in (_NAME, *below.split("/")):
        here = os.path.join(here, name)
        folder = _open_own(name, folder, here, make)
        stack.callback(os.close, folder)
    except FileNotFoundError:
      raise
    except OSError as error:
      raise CacheError(f"{here}: {error.strerror}") from None
    yield CacheFolder(path, folder)


def _make_top(path: str) -> None:
  """Makes the folder above palm_mtf/, such as ~/.cache."""
  above = os.path.dirname(path)
  if not os.path.isdir(path) and above != path:
    _make_top(above)
    _check_may_make(os.stat(above), above)
    _make_folder(path)


def _make_folder(name: str, above: int | None = None) -> None:
  with contextlib.suppress(FileExistsError):
    os.mkdir(name, 0o700, dir_fd=above)
    os.chmod(name, 0o700, dir_fd=above)  # regardless of the umask


def _open_own(name: str, above: int, path: str, make: bool) -> int:
  """Returns a descriptor of a folder that only this user may write."""
  try:
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=above)
  except FileNotFoundError:
    if not make:
      raise
    _check_may_make(os.fstat(above), os.path.dirname(path))
    _make_folder(name, above)
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=above)
  except NotADirectoryError:
    raise CacheError(
      f"{path} is a link or a file; set XDG_CACHE_HOME to a folder of yours"
    ) from None
  try:
    _check_owner(os.fstat(folder), path)
    if os.fstat(folder).st_mode & _WRITABLE_BY_OTHERS:
      # The folder may have been made with another umask. Take away other users'
      # permissions; `read` refuses files that these users have put there.
      os.fchmod(folder, 0o700)
    if os.fstat(folder).st_mode & _WRITABLE_BY_OTHERS:
      raise CacheError(f"other users may write {path}")
  except BaseException:
    os.close(folder)
    raise
  return folder


def _check_may_make(status: os.stat_result, path: str) -> None:
  # Refuse to write as root into the home of the user who called sudo, because
  # the user could not remove the files.
  if status.st_uid:  # folders of root, such as /tmp, are shared
    _check_owner(status, path)


def _check_owner(status: os.stat_result, path: str) -> None:
  if status.st_uid != os.geteuid():
    raise CacheError(
      f"{path} belongs to another user; set XDG_CACHE_HOME to a folder of yours"
    )


class CacheFolder:
  """An open folder that only this user may write."""

  def __init__(self, path: str, descriptor: int):
    self._path, self.descriptor = path, descriptor

  def names(self) -> list[str]:
    """Returns the names of complete files, the newest first."""
    times = {}
    for name in os.listdir(self.descriptor):
      if not name.startswith(_PARTIAL):
        with contextlib.suppress(FileNotFoundError):  # removed in the meantime
          times[name] = os.lstat(name, dir_fd=self.descriptor).st_mtime
    return sorted(times, key=times.get, reverse=True)

  def read(self, name: str) -> bytes | None:
    """Returns the content of a file; None if the file is missing.

    Raises CacheError if another user may write the file, or it is unreadable.
    """
    path = os.path.join(self._path, name)
    try:
      opened = os.open(name, _FILE_FLAGS, dir_fd=self.descriptor)
      with open(opened, "rb") as file:
        status = os.fstat(file.fileno())
        _check_owner(status, path)
        if status.st_mode & _WRITABLE_BY_OTHERS:
          raise CacheError(f"other users may write {path}; remove it")
        if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_BYTES:
          raise CacheError(f"{path} is no file of palm_mtf; remove it")
        return file.read()
    except FileNotFoundError:
      return None
    except OSError as error:
      raise CacheError(f"{path}: {error.strerror}") from None

  def write(self, name: str, content: bytes) -> None:
    """Writes a file atomically over files or folders; may raise CacheError."""
    folder = self.descriptor
    partial = f"{_PARTIAL}{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
    try:
      with open(os.open(partial, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), 0o600)
        os.fsync(file.fileno())
        try:
          os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
        except IsADirectoryError:
          self.remove(name)
          os.replace(partial, name, src_dir_fd=folder, dst_dir_fd=folder)
    except OSError as error:
      self.remove(partial)
      # Name only the top folder, so that errors in several folders have the
      # same message, which is logged once.
      top, _, _ = self._path.rpartition(f"/{_NAME}/")
      raise CacheError(f"{top}/{_NAME}: {error.strerror}") from None

  def remove(self, name: str) -> None:
    """Removes a file or folder; ignores errors."""
    _remove(name, self.descriptor)

  def load(self, names: Iterable[str]) -> dict[str, bytes]:
    """Returns {name: content} of files that `keep` wrote; removes damaged ones.

    To limit the cache, keeps the first 64 MiB; removes the files after them.
    """
    found, num_bytes, damaged = {}, 0, []
    for name in names:
      try:
        content = self.read(name)
      except CacheError:
        content = b""
      if content is None:
        continue
      num_bytes += len(content)
      if num_bytes > _MAX_BYTES:
        self.remove(name)
      elif _seal(name, content[:-_SEAL_BYTES]) == content[-_SEAL_BYTES:]:
        found[name] = content[:-_SEAL_BYTES]
      else:
        damaged.append(name)
        self.remove(name)
    if damaged:
      more = f" and {len(damaged) - 1} more" if damaged[1:] else ""
      _logger.warning(
        f"{self._path}: not what this user wrote there, removed and compiled "
        f"again: {damaged[0]}{more}"
      )
    return found

  def keep(self, name: str, content: bytes) -> None:
    """Writes a file and its hash, which `load` checks; may raise CacheError."""
    self.write(name, content + _seal(name, content))

  def keep_newest(self, name: str, content: bytes, most: int) -> None:
    """Writes a file as `keep` does, then keeps only the newest `most` files.

    Files that killed processes did not complete are removed, too.
    """
    self.keep(name, content)
    remove_abandoned(self.descriptor)
    for old in self.names()[most:]:
      self.remove(old)


def _seal(name: str, content: bytes) -> bytes:
  return hashlib.sha256(name.encode() + b"\0" + content).digest()


@contextlib.contextmanager
def partial_folder(above: int) -> Iterator[CacheFolder]:
  """Yields a new folder, which is removed at the end.

  The folder is inside the folder that has the descriptor `above`, from which
  files and folders of killed processes are removed first.
  """
  remove_abandoned(above)
  name = f"{_PARTIAL}{os.urandom(8).hex()}"
  _make_folder(name, above)
  try:
    folder = os.open(name, _FOLDER_FLAGS, dir_fd=above)
    try:
      if os.fstat(folder).st_uid != os.geteuid():  # replaced in the meantime
        raise PermissionError(errno.EPERM, "belongs to another user", name)
      yield CacheFolder("", folder)
    finally:
      os.close(folder)
  finally:
    _remove(name, above)


def remove_abandoned(above: int) -> None:
  """Removes killed processes' files from the folder with descriptor `above`."""
  for name in os.listdir(above):
    if name.startswith(_PARTIAL):
      with contextlib.suppress(OSError):
        status = os.lstat(name, dir_fd=above)
        is_old = time.time() - status.st_mtime > _ABANDONED_SECS
        if is_old and status.st_uid == os.geteuid():
          _remove(name, above)


def _remove(name: str, above: int) -> None:
  with contextlib.suppress(OSError):
    os.unlink(name, dir_fd=above)
  shutil.rmtree(name, ignore_errors=True, dir_fd=above)
