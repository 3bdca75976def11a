# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Globs to text files, by name, size and time; read_files.py reads them.

`{stdlib}` in a glob stands for the folder of the running Python's standard
library, without the packages installed in it. Where a glob matches no file, the
part of it that exists as it is written, such as a folder "data [v2]", is taken
so, and the rest is a glob.
"""

import glob
import os
import sysconfig
from collections.abc import Sequence
from typing import NamedTuple

from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.user_text import check_compression, compression_of, format_of

_NOT_STANDARD_LIBRARY = {"site-packages", "dist-packages", "__pycache__"}


class TextFile(NamedTuple):
  """A file of documents, compressed or not."""

  path: str
  num_bytes: int  # on disk
  mtime_ns: int  # time of change, since 1970
  # Times are set by who extracts an archive; these the file system sets alone.
  ctime_ns: int
  inode: int

  @property
  def compression(self) -> str:
    """One of `user_text.COMPRESSIONS`, or "" for none."""
    return compression_of(self.path)

  @property
  def is_json_lines(self) -> bool:
    """Whether each line is a document; otherwise the file is one."""
    return format_of(self.path) == ".jsonl"


def find_files(
  globs: str | Sequence[str], setting: str = "TEXT_FILES"
) -> list[TextFile]:
  """Returns the files that globs match, each once, sorted by path.

  Args:
    globs: one glob or several.
    setting: name of the setting that holds them, for messages.

  Raises:
    UserError: a glob matches no file, names a folder, matches a file that may
      not be read or decompressed, or all files are empty.
  """
  paths = set()
  for pattern in [globs] if isinstance(globs, str) else globs:
    paths.update(_match(pattern, f"{setting} = {pattern!r}"))
  # All files are looked at before the first is read, which may take hours.
  for path in sorted(paths):
    check_compression(path, f"{setting}: {path}")
  files = [describe_file(path, setting) for path in sorted(paths)]
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
  patterns = _without_installed(expanded, stdlib) if is_stdlib else [expanded]
  matches = [x for each in patterns for x in glob.glob(each, recursive=True)]
  if is_stdlib:
    matches = [
      path
      for path in matches
      if _NOT_STANDARD_LIBRARY.isdisjoint(path[len(stdlib) :].split(os.sep))
    ]
  paths = [path for path in matches if os.path.isfile(path)]
  if not paths and not is_stdlib:
    literally = glob.glob(_escape_existing(expanded), recursive=True)
    paths = [path for path in literally if os.path.isfile(path)]
    matches += literally
  if not paths:
    raise UserError(_explain_no_match(pattern, what, expanded, matches))
  return paths


def _escape_existing(pattern: str) -> str:
  """Returns a glob whose longest part that exists as written is escaped."""
  existing, rest = pattern, []
  while not os.path.lexists(existing):
    existing, name = os.path.split(existing)
    rest.insert(0, name)
  return os.path.join(glob.escape(existing), *rest)


def _without_installed(pattern: str, stdlib: str) -> list[str]:
  """Returns globs of the same files that do not walk installed packages."""
  # site-packages holds often ten times as many files as the library. So
  # "<stdlib>/**/*.py" becomes "<stdlib>/*.py", "<stdlib>/json/**/*.py", ...
  root = glob.escape(stdlib)
  start, _, rest = pattern.partition(os.path.join(root, "**", ""))
  if start or not rest:
    return [pattern]
  folders = [
    entry.name
    for entry in os.scandir(stdlib)
    if entry.is_dir() and not entry.name.startswith(".")
  ]
  return [
    os.path.join(root, rest),
    *(
      os.path.join(root, glob.escape(name), "**", rest)
      for name in folders
      if name not in _NOT_STANDARD_LIBRARY
    ),
  ]


def describe_file(path: str, setting: str = "") -> TextFile:
  """Returns the size and times of a file.

  Raises:
    UserError: it may not be read; begins with `setting`.
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
  """Raises UserError if a file that was read is not the one that was found."""
  # Tokens are named by the hash of what was found. A chmod changes neither.
  now = describe_file(file.path)
  if (now.num_bytes, now.mtime_ns) != (file.num_bytes, file.mtime_ns):
    raise UserError(
      f"{file.path}: was changed while it was read; start again when its "
      "writer is done."
    )


def _explain_no_match(
  pattern: str, what: str, expanded: str, matches: list[str]
) -> str:
  stem = pattern.rstrip("/*") or "/"
  if os.path.isdir(expanded):
    return (
      f"{what}: a folder; give a glob of the files in it, such as "
      f"'{stem}/**/*.txt'."
    )
  if any(os.path.isdir(path) for path in matches):
    return (
      f"{what}: matches folders only; give a glob of the files in them, such "
      f"as '{stem}/**/*.txt'."
    )
  if matches:
    return (
      f"{what}: {matches[0]} is a pipe, a device or a link to nothing, and "
      "text is read more than once; give a file."
    )
  # Up from the glob to the nearest folder that exists; `missing` is the
  # highest folder of its path without wildcards that does not.
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
