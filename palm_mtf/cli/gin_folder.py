# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Finds gin files: in the package's gin folder, and the user's own files.

In a checkout, and so in an editable install, palm_mtf/gin is a link to the gin
folder next to palm_mtf. This module imports neither gin nor TensorFlow.
"""

import os
import re
from pathlib import Path

from palm_mtf import gin_path
from palm_mtf.errors import UserError, did_you_mean

# Names of palm_mtf's gin files may begin with this prefix, because gin itself
# finds the files of the installed package by such names.
_PACKAGE_NAME = "palm_mtf/gin/"


def gin_folder() -> Path:
  """Returns palm_mtf's gin folder, which has defaults/, recipes/ and so on."""
  folder = Path(gin_path()).resolve()
  if (folder / "defaults" / "train.gin").is_file():
    return folder
  raise UserError(
    f"the gin folder is missing from {folder.parent}: install palm_mtf again."
  )


def defaults_file(command: str) -> Path:
  """Returns the path of the gin file with a command's help and defaults."""
  return gin_folder() / "defaults" / f"{command.replace(' ', '_')}.gin"


def shorten_path(path: Path) -> str:
  """Shortens a path for messages, relative to the gin or the current folder."""
  for folder in (gin_folder(), Path.cwd()):
    if path.is_relative_to(folder):
      return str(path.relative_to(folder))
  return str(path)


def find_gin_file(name: str) -> Path:
  """Finds a --gin_file in the current folder, otherwise in the gin folder.

  The file may be a pipe, which can be read only once.
  """
  return _first_file(f"--gin_file={name}", name, [Path.cwd(), gin_folder()])


def find_include(name: str, including: Path, line: int) -> Path:
  """Finds the file `name` that line `line` of the file `including` includes.

  Searches the folder of the including file, then the gin folder, then the
  current folder.
  """
  return _first_file(
    f'{shorten_path(including)}:{line}: include "{name}"',
    name,
    [including.parent, gin_folder(), Path.cwd()],
  )


def read_header(path: Path) -> list[str]:
  """Returns the comment lines at a gin file's top, for help, without "# "."""
  lines = path.read_text(encoding="utf-8").splitlines()
  end = next((i for i, x in enumerate(lines) if x[:1] != "#"), len(lines))
  return [re.sub("^# ?", "", line) for line in lines[:end]]


def _first_file(what: str, name: str, folders: list[Path]) -> Path:
  if name.startswith(_PACKAGE_NAME):
    name, folders = name.removeprefix(_PACKAGE_NAME), [gin_folder()]
  for folder in folders:
    path = folder / os.path.expanduser(name)  # an absolute `name` stays
    # Use os.path, because pathlib raises an error if the name is too long.
    if os.path.isfile(path):
      return path.resolve()
    if os.path.isdir(path) and name:
      raise UserError(f"{what}: a folder; name a gin file in it.")
    # Do not resolve the path of a pipe, such as `<(...)`, because the resolved
    # name does not exist as a file.
    if os.path.exists(path) and name:
      return path
  raise UserError(
    f"{what}: no such file{_suggest_file(name, folders)}. Looked in "
    f"{' and '.join(dict.fromkeys(map(_describe, folders)))}."
  )


def _describe(folder: Path) -> str:
  if folder == Path.cwd():
    return "the current folder"
  return "the package's gin folder" if folder == gin_folder() else str(folder)


def _suggest_file(name: str, folders: list[Path]) -> str:
  existing = {}
  for path in sorted(gin_folder().glob("*/*.gin")):
    existing[str(path.relative_to(gin_folder()))] = None
  for folder in folders:
    parent = (folder / name).parent
    for path in sorted(parent.glob("*.gin")) if os.path.isdir(parent) else []:
      existing[str(Path(name).parent / path.name)] = None
  # Compare whole paths first: for models/palm_9b.gin, models/palm_8b.gin is a
  # better suggestion than recipes/palm_8b.gin.
  if "/" in name and (guess := did_you_mean(name, existing)):
    return guess
  # If models/ and recipes/ have files of the same name, this suggests the file
  # in recipes/, which comes last in `existing`.
  by_stem = {Path(path).stem: path for path in existing}
  guess = did_you_mean(Path(name).stem, by_stem)
  for stem, path in by_stem.items():
    guess = guess.replace(f'"{stem}"', f'"{path}"')
  return guess
