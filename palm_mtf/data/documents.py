# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads documents one by one, each with its place in or out of training.

One file is one document, kept as it is, byte for byte. A document's `rank` is
a hash of its text, spread evenly over [0, 1); the documents of rank below
VALIDATION_SHARE are held out. The split therefore depends on no order and no
file name, equal texts are never on both sides, and a larger share only adds
documents. files.py finds the files; tokens.py turns documents into tokens.
"""

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import NamedTuple

from palm_mtf.config import DataConfig
from palm_mtf.console import say
from palm_mtf.data.files import TextFile, find_files
from palm_mtf.errors import UserError


class Document(NamedTuple):
  """One document.

  Attributes:
    text: its text; line endings and byte order mark are left as they are.
    num_bytes: size of the text in UTF-8.
    rank: hash of the text in [0, 1).
  """

  text: str
  num_bytes: int
  rank: float


@dataclasses.dataclass
class Corpus:
  """The documents of TEXT_FILES; every iteration reads them anew, in order.

  One document is in memory at a time. Files that are empty are left out, and
  so are those that are not text (not UTF-8, or with a NUL byte), which
  `report_skipped` tells.

  Attributes:
    data: where the text comes from.
    files: the files, sorted by path.
    skipped: paths of the files that the latest iteration found not to be text.
  """

  data: DataConfig
  files: list[TextFile] = dataclasses.field(init=False)
  skipped: list[str] = dataclasses.field(init=False, default_factory=list)

  def __post_init__(self):
    self.files = find_files(self.data)

  @property
  def num_bytes(self) -> int:
    """Size of all files."""
    return sum(file.num_bytes for file in self.files)

  def is_validation(self, document: Document) -> bool:
    """Whether `document` is held out of training."""
    return document.rank < self.data.validation_share

  def __iter__(self) -> Iterator[Document]:
    self.skipped = []
    found = False
    for file in self.files:
      content = _read(file.path)
      if not content:
        continue
      text = _decode(content)
      if text is None:
        self.skipped.append(file.path)
        continue
      found = True
      yield Document(text, len(content), _rank(content))
    if not found:
      raise UserError(
        f"TEXT_FILES = {self.data.text_files!r}: none of "
        f"{len(self.files):,} files is text{self._describe_skipped()}."
      )

  def report_skipped(self) -> None:
    """Says on stderr how many files were left out, and names the first."""
    if self.skipped:
      say(
        f"{len(self.skipped):,} of {len(self.files):,} files left out"
        f"{self._describe_skipped()}."
      )

  def _describe_skipped(self) -> str:
    first = f", such as {self.skipped[0]}" if self.skipped else ""
    return f" (not UTF-8, or with NUL bytes{first})"


def _read(path: str) -> bytes:
  try:
    with open(path, "rb") as file:
      return file.read()
  except OSError as error:
    raise UserError(f"TEXT_FILES: {path}: {error.strerror}.") from None


def _decode(content: bytes) -> str | None:
  """Returns the text, or None for what is not text."""
  if b"\0" in content:
    return None
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError:
    return None


def _rank(content: bytes) -> float:
  digest = hashlib.blake2b(content, digest_size=6).digest()
  return int.from_bytes(digest, "little") / 2.0**48  # exact: a float has 53
