# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Hashes of files' contents, kept between runs."""

import json
import os
import time
from collections.abc import Iterable, Sequence

from palm_mtf.console import progress_bar
from palm_mtf.data.sources.find_files import TextFile, describe_file
from palm_mtf.errors import UserError
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.sealed import hash_file

# A file may change twice within one tick of its file system's clock, and keep
# its time; a digest is not kept until the file is older than this.
_SETTLED_NS = 2_000_000_000


class FileDigests:
  """Digests of files, from a JSON file or by reading.

  Used as a context manager, it writes the JSON file at the end, also when the
  body is interrupted.
  """

  def __init__(self, path: str | None = None):
    """Loads the digests kept at `path`, if any; None keeps nothing."""
    self._path = path and os.path.abspath(path)
    # {path of a file: [*_state(file), digest]}. Hashing takes a second for a
    # gigabyte; a file in a known state is not read, so that a run on unchanged
    # text starts at once.
    self._known = _read_known(self._path) if self._path else {}
    self._has_new = False

  def __enter__(self) -> "FileDigests":
    return self

  def __exit__(self, *exception: object) -> None:
    if self._path and self._has_new:
      content = json_text(self._known, indent=0).encode()
      write_atomically(self._path, content)
      self._has_new = False

  def read(self, files: Sequence[TextFile]) -> list[str]:
    """Returns a digest of each file's bytes, in hexadecimal.

    Raises:
      UserError: a file cannot be read; names it.
    """
    digests = [self._find(file) for file in files]
    unread = [i for i, digest in enumerate(digests) if digest is None]
    if unread:
      num_bytes = sum(files[i].num_bytes for i in unread)
      with progress_bar("Hashing text", num_bytes) as advance:
        for i in unread:
          digests[i] = self._read_one(files[i])
          advance(files[i].num_bytes)
    return digests

  def _find(self, file: TextFile) -> str | None:
    known = self._known.get(file.path)
    return known[-1] if known and known[:-1] == _state(file) else None

  def _read_one(self, file: TextFile) -> str:
    started_ns = time.time_ns()
    try:
      digest = hash_file(file.path)
    except OSError as error:
      raise UserError(f"{file.path}: {error.strerror}.") from None
    if max(file.mtime_ns, file.ctime_ns) < started_ns - _SETTLED_NS:
      self._known[file.path] = [*_state(file), digest]
      self._has_new = True
    return digest


def _state(file: TextFile) -> list[int]:
  return [file.num_bytes, file.mtime_ns, file.ctime_ns, file.inode]


def writable_folder(shared: str | None, own: str) -> str:
  """Returns where to keep what other runs may use too.

  Args:
    shared: CACHE_DIR, if there is one; others may own it.
    own: folder in MODEL_DIR.
  """
  return shared if shared and os.access(shared, os.W_OK) else own


def describe_shards(
  paths: Iterable[str], digests: FileDigests | None
) -> list[str]:
  """Returns the names of what is no local file, then the digests of files."""
  paths = [os.fspath(path) for path in paths]
  files = [describe_file(path) for path in paths if os.path.isfile(path)]
  others = [path for path in paths if not os.path.isfile(path)]
  return others + (digests or FileDigests()).read(files)


def _read_known(path: str) -> dict[str, list]:
  try:
    with open(path, encoding="utf-8") as file:
      known = json.load(file)
    return {str(name): [*each] for name, each in known.items()}
  except (OSError, ValueError, RecursionError, AttributeError, TypeError):
    return {}  # missing, or damaged: made anew
