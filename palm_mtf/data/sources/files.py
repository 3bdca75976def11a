# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds the files that globs match, and hashes them.

In a glob, `{stdlib}` stands for the folder of the running Python's standard
library, without installed packages. If a glob matches no file, its longest
prefix that exists is taken literally, and only the rest is a pattern, so that a
folder may be named "data [v2]".
"""

import contextlib
import glob
import json
import os
import sysconfig
import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from palm_mtf.console import progress_bar
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.json_text import json_text
from palm_mtf.model_dir.atomic_files import write_atomically
from palm_mtf.model_dir.foreign_files import hash_file
from palm_mtf.user_text import (
  TEXT_PREFIX,
  check_compression,
  compression_of,
  format_of,
)

_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}
# If a file changes twice within one tick of the file system's clock (2 s on
# FAT), its times do not show the second change. So cache a file's hash only if
# the last change is older than this when reading begins.
_SETTLED_NS = 2_000_000_000


class TextFile(NamedTuple):
  """A file of documents, with its size, times and inode when it was found."""

  path: str
  num_bytes: int  # on disk, maybe compressed
  mtime_ns: int
  # Tools such as tar set mtime, so a changed file may have an old mtime.
  # Therefore ctime and inode are compared too.
  ctime_ns: int
  inode: int
  is_text: bool = False  # its glob says plain text, even if named .jsonl

  @property
  def compression(self) -> str:
    """The compression, such as ".gz"; "" for none."""
    return compression_of(self.path)

  @property
  def is_json_lines(self) -> bool:
    """Whether each line is a document; otherwise the file is one document."""
    return not self.is_text and format_of(self.path) == ".jsonl"

  @property
  def state(self) -> list[int]:
    """Size, times and inode; one of them differs after a change of the file."""
    return [self.num_bytes, self.mtime_ns, self.ctime_ns, self.inode]


def find_files(
  globs: str | Sequence[str], setting: str = "TEXT_FILES"
) -> list[TextFile]:
  """Returns the files that the globs match, without repeats, sorted by path.

  A glob may begin with `user_text.TEXT_PREFIX`; the files that it matches are
  plain text, even if another glob matches them too.

  Raises UserError if a glob matches no file, names a folder, or matches a file
  that may not be read or decompressed; or all files are empty.
  """
  paths: dict[str, bool] = {}  # {path: whether a glob calls it plain text}
  for pattern in [globs] if isinstance(globs, str) else globs:
    is_text = pattern.startswith(TEXT_PREFIX)
    name = pattern.removeprefix(TEXT_PREFIX)
    for path in _match(name, f"{setting} = {pattern!r}"):
      paths[path] = is_text or paths.get(path, False)
  # Check now that all files can be decompressed, not after hours of reading.
  for path in sorted(paths):
    check_compression(path, f"{setting}: {path}")
  files = [
    describe_file(path, setting)._replace(is_text=is_text)
    for path, is_text in sorted(paths.items())
  ]
  if not any(file.num_bytes for file in files):
    raise UserError(
      f"{setting} = {globs!r}: all {len(files):,} files are empty, such as "
      f"{files[0].path}; give files with text."
    )
  return files


def _match(pattern: str, what: str) -> list[str]:
  stdlib = os.path.realpath(sysconfig.get_path("stdlib"))
  expanded = pattern.replace("{stdlib}", glob.escape(stdlib))
  expanded = os.path.abspath(os.path.expanduser(expanded))
  is_stdlib = "{stdlib}" in pattern
  patterns = _exclude_installed(expanded, stdlib) if is_stdlib else [expanded]
  matches = [x for each in patterns for x in glob.glob(each, recursive=True)]
  if is_stdlib:
    matches = [
      path
      for path in matches
      if _NOT_STANDARD_LIBRARY.isdisjoint(path[len(stdlib) :].split(os.sep))
    ]
  paths = [path for path in matches if os.path.isfile(path)]
  if not paths and not is_stdlib:
    # Escape the longest prefix that exists: "[v2]" may be in a folder's name.
    prefix, rest = expanded, []
    while not os.path.lexists(prefix):
      prefix, name = os.path.split(prefix)
      rest.insert(0, name)
    literal = os.path.join(glob.escape(prefix), *rest)
    literally = glob.glob(literal, recursive=True)
    paths = [path for path in literally if os.path.isfile(path)]
    matches += literally
  if not paths:
    raise UserError(_explain_no_match(pattern, what, expanded, matches))
  return paths


def _exclude_installed(pattern: str, stdlib: str) -> list[str]:
  # Do not walk site-packages, which often has ten times as many files as the
  # standard library: "<stdlib>/**/*.py" becomes "<stdlib>/*.py",
  # "<stdlib>/json/**/*.py" and so on.
  root = glob.escape(stdlib)
  start, _, rest = pattern.partition(os.path.join(root, "**", ""))
  if start or not rest:
    return [pattern]
  folders = [
    os.path.join(root, glob.escape(x.name), "**", "")
    for x in os.scandir(stdlib)
    if x.is_dir() and x.name[0] != "." and x.name not in _NOT_STANDARD_LIBRARY
  ]
  return [os.path.join(folder, rest) for folder in (root, *folders)]


def _explain_no_match(
  pattern: str, what: str, expanded: str, matches: list[str]
) -> str:
  example = f"such as '{pattern.rstrip('/*') or '/'}/**/*.txt'"
  if os.path.isdir(expanded):
    return f"{what}: a folder; give a glob of the files in it, {example}."
  if any(os.path.isdir(path) for path in matches):
    return (
      f"{what}: matches folders only; give a glob of the files in them, "
      f"{example}."
    )
  if matches:
    return (
      f"{what}: {matches[0]} is a pipe, a device or a link to nothing, and "
      "text is read more than once; give a file."
    )
  # For the message, walk up from the glob to the nearest folder that exists.
  # `missing` becomes the path just below it, or "" if that has a wildcard.
  missing, folder = "", expanded
  while not os.path.isdir(folder):
    if not glob.has_magic(folder):
      missing = folder
    folder = os.path.dirname(folder)
  if not os.access(folder, os.R_OK | os.X_OK):
    return (
      f"{what}: the folder {folder} may not be read; change its permissions."
    )
  if missing and missing != expanded:
    guess = did_you_mean(os.path.basename(missing), os.listdir(folder))
    return (
      f"{what}: no folder {missing}{guess}; the nearest that exists is "
      f"{folder}."
    )
  guess = did_you_mean(os.path.basename(expanded), os.listdir(folder))
  brackets = "; write [[] for a bracket of a name" if "[" in pattern else ""
  return (
    f"{what}: matches no file; the folder {folder} exists, but holds no such "
    f"file{guess}{brackets}."
  )


def describe_file(path: str, setting: str = "") -> TextFile:
  """Returns a file's size, times and inode, by which changes are detected.

  Raises UserError if the file may not be read; the message begins with
  `setting`.
  """
  where = f"{setting}: {path}" if setting else path
  if not os.access(path, os.R_OK):
    raise UserError(
      f"{where} may not be read; change its permissions, or give a "
      "glob that leaves it out."
    )
  try:
    stat = os.stat(path)
  except OSError as error:
    raise UserError(f"{where}: {error.strerror}.") from None
  times = stat.st_mtime_ns, stat.st_ctime_ns
  return TextFile(path, stat.st_size, *times, stat.st_ino)


def check_unchanged(file: TextFile) -> None:
  """Raises UserError if a file changed after it was found."""
  # A changed file would not match the hash by which its tokens are cached. Do
  # not compare ctime, because chmod changes ctime but not the content.
  now = describe_file(file.path)
  if (now.num_bytes, now.mtime_ns) != (file.num_bytes, file.mtime_ns):
    raise UserError(
      f"{file.path}: was changed while it was read; start again when its "
      "writer is done."
    )


class FileDigests(contextlib.AbstractContextManager):
  """Hashes of files, cached in a JSON file that `__exit__` writes."""

  def __init__(self, path: str | None = None):
    """Loads the file `path` if it exists; if `path` is None, writes no file."""
    self._path = path and os.path.abspath(path)
    # {path: [*TextFile.state, hash]}. Hash a file again only if its state has
    # changed, because hashing reads only about 1 GB/s.
    self._known = _read_known(self._path) if self._path else {}
    self._has_new = False
    self._read: dict[str, tuple[int, str]] = {}

  def __exit__(self, *exception: object) -> None:
    if self._path and self._has_new:
      content = json_text(self._known, indent=0).encode()
      write_atomically(self._path, content)
      self._has_new = False

  def read(self, files: Sequence[TextFile]) -> list[str]:
    """Returns a hash of each file's bytes, in hexadecimal.

    Raises UserError if a file cannot be read.
    """
    found = {x: self._known.get(x.path, [None]) for x in files}
    digests = {x: y[-1] for x, y in found.items() if y[:-1] == x.state}
    unread = [file for file in files if file not in digests]
    if unread:
      num_bytes = sum(file.num_bytes for file in unread)
      with progress_bar("Hashing text", num_bytes) as advance:
        for file in unread:
          digests[file] = self._hash(file)
          advance(file.num_bytes)
    self._read |= {x.path: (x.num_bytes, digests[x]) for x in files}
    return [digests[file] for file in files]

  def find_changed(self, files: Sequence[TextFile]) -> TextFile | None:
    """Returns a file whose bytes differ from its cached hash, if any does."""
    known = [self._known.get(x.path, [None])[-1] for x in files]
    found = zip(files, known, self.read(files), strict=True)
    return next((x for x, old, new in found if old not in (None, new)), None)

  def take(self) -> dict[str, tuple[int, str]]:
    """Returns {path: (size, hash)} of the files read since the last call."""
    found, self._read = self._read, {}
    return found

  def _hash(self, file: TextFile) -> str:
    started_ns = time.time_ns()
    try:
      digest = hash_file(file.path)
    except OSError as error:
      raise UserError(f"{file.path}: {error.strerror}.") from None
    if max(file.mtime_ns, file.ctime_ns) < started_ns - _SETTLED_NS:
      self._known[file.path] = [*file.state, digest]
      self._has_new = True
    return digest


def _read_known(path: str) -> dict[str, list]:
  try:
    with open(path, encoding="utf-8") as file:
      known = json.load(file)
    return {str(name): [*each] for name, each in known.items()}
  except (OSError, ValueError, RecursionError, AttributeError, TypeError):
    return {}  # the cache is missing or damaged: hash every file again


def writable_folder(shared: str | None, own: str) -> str:
  """Returns where to save hashes and filters' decisions: `shared` if writable.

  `shared` is CACHE_DIR, where other runs find these files. If CACHE_DIR is not
  set or not writable, returns `own`, a folder in MODEL_DIR.
  """
  return shared if shared and os.access(shared, os.W_OK) else own


def describe_shards(
  paths: Iterable[str], digests: FileDigests | None
) -> list[str]:
  """Returns remote files' paths, then local files' hashes.

  The fingerprint of a SeqIO task includes this result. `digests` is a cache of
  hashes; without a cache, every local file is hashed.
  """
  paths = [os.fspath(path) for path in paths]
  files = [describe_file(path) for path in paths if os.path.isfile(path)]
  others = [path for path in paths if not os.path.isfile(path)]
  return others + (digests or FileDigests()).read(files)
