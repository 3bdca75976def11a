# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Where gin files lie: the package's gin folder and the user's own files.

In a checkout, and so in an editable install, the folder in the package is a
link to the one beside it. Neither gin nor TensorFlow is imported here. What the
files say is read in gin_statements.py.
"""

import functools
import logging
import os
import re
from pathlib import Path

from palm_mtf import gin_path
from palm_mtf.errors import UserError, did_you_mean

_logger = logging.getLogger(__name__)

# What plain gin calls our folder, whose files it finds as those of a package.
_PACKAGE_NAME = "palm_mtf/gin/"
# The earlier name of the folder defaults/ in it. One version keeps it.
_OLD_DEFAULTS = "runs"


def gin_folder() -> Path:
  """Returns the folder that holds defaults/, models/, recipes/ and so on."""
  folder = Path(gin_path()).resolve()
  if (folder / "defaults" / "train.gin").is_file():
    return folder
  raise UserError(
    f"the gin folder is missing from {folder.parent}: install palm_mtf again."
  )


def defaults_file(command: str) -> Path:
  """Returns the file with the help and the own defaults of a command."""
  return gin_folder() / "defaults" / f"{command.replace(' ', '_')}.gin"


def shown(path: Path) -> str:
  """A file's shortest name: in the gin folder, else here, else absolute."""
  for folder in (gin_folder(), Path.cwd()):
    if path.is_relative_to(folder):
      return str(path.relative_to(folder))
  return str(path)


def find_gin_file(name: str) -> Path:
  """Finds a `--gin_file`: in the current folder, else in the gin folder.

  The file may be a pipe, which can be read only once.
  """
  return _first_file(f"--gin_file={name}", name, [Path.cwd(), gin_folder()])


def find_include(name: str, including: Path, line: int) -> Path:
  """Finds an included file: beside its includer, in the gin folder, or here."""
  return _first_file(
    f'{shown(including)}:{line}: include "{name}"',
    name,
    [including.parent, gin_folder(), Path.cwd()],
  )


def header(path: Path) -> list[str]:
  """The comment lines at the top of a gin file, without their "# "."""
  lines = path.read_text(encoding="utf-8").splitlines()
  end = next((i for i, x in enumerate(lines) if x[:1] != "#"), len(lines))
  return [re.sub("^# ?", "", line) for line in lines[:end]]


def _first_file(what: str, name: str, folders: list[Path]) -> Path:
  if name.startswith(_PACKAGE_NAME):
    name, folders = name.removeprefix(_PACKAGE_NAME), [gin_folder()]
  for folder in folders:
    path = folder / os.path.expanduser(name)  # an absolute name stays itself
    # Unlike pathlib's, these take a name that is too long for one that is not.
    if os.path.isfile(path):
      return path.resolve()
    if os.path.isdir(path) and name:
      raise UserError(f"{what}: a folder; name a gin file in it.")
    # A pipe, such as that of `<(...)`. No file has its resolved name.
    if os.path.exists(path) and name:
      return path
  if gin_folder() in folders and (path := _renamed(name)):
    return path
  raise UserError(
    f"{what}: no such file{_nearest(name, folders)}. Looked in "
    f"{' and '.join(dict.fromkeys(map(_described, folders)))}."
  )


@functools.cache  # one warning for each name
def _renamed(name: str) -> Path | None:
  """Returns the file that had this name in the gin folder, with a warning."""
  folder, _, rest = name.partition("/")
  path = gin_folder() / "defaults" / rest
  if folder != _OLD_DEFAULTS or not os.path.isfile(path):
    return None
  _logger.warning("%s is now called %s: use the new name.", name, shown(path))
  return path


def _described(folder: Path) -> str:
  if folder == Path.cwd():
    return "the current folder"
  return "the package's gin folder" if folder == gin_folder() else str(folder)


def _nearest(name: str, folders: list[Path]) -> str:
  """Says which existing file is nearest, by its whole name or its last part."""
  existing = {}
  for path in sorted(gin_folder().glob("*/*.gin")):
    existing[str(path.relative_to(gin_folder()))] = None
  for folder in folders:
    beside = (folder / name).parent
    for path in sorted(beside.glob("*.gin")) if os.path.isdir(beside) else []:
      existing[str(Path(name).parent / path.name)] = None
  # By the whole path first: models/palm_9b.gin is nearer to models/palm_8b.gin
  # than to recipes/palm_8b.gin.
  if "/" in name and (guess := did_you_mean(name, existing)):
    return guess
  by_stem = {Path(path).stem: path for path in existing}  # recipes/ come late
  guess = did_you_mean(Path(name).stem, by_stem)
  for stem, path in by_stem.items():
    guess = guess.replace(f'"{stem}"', f'"{path}"')
  return guess
