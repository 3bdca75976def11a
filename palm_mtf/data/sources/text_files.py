# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The source of TEXT_FILES: files of text and of JSON lines.

A file is one document, kept as it is, byte for byte; in a .jsonl file a line is
one. find_files.py finds the files and read_files.py reads them; document.py
says which documents are held out.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence

from palm_mtf.data.sources.document import TRAIN, VALIDATION, Document
from palm_mtf.data.sources.file_hashes import FileDigests
from palm_mtf.data.sources.find_files import TextFile, find_files
from palm_mtf.data.sources.read_files import (
  MACROS,
  Fields,
  Settings,
  read_file,
  read_json_lines,
)
from palm_mtf.errors import UserError

_logger = logging.getLogger(__name__)


class TextFiles:
  """The documents of some files, in the order of their paths.

  One document is in memory at a time. Left out are empty documents, and what
  is not text, which `report_skipped` tells: files that are not UTF-8 or have a
  NUL byte, and JSON lines whose text has a NUL or half of a surrogate pair.

  Attributes:
    name: name of the source.
    rate: 1, the share of the rows that come from here.
    has_inputs: False.
    files: the files, sorted by path.
  """

  rate = 1.0
  has_inputs = False

  def __init__(
    self,
    globs: str | Sequence[str],
    *,
    text_field: str = "text",
    weight_field: str | None = None,
    validation_share: float,
    name: str = "text_files",
    settings: Settings = MACROS,
  ):
    """Finds the files.

    Args:
      globs: one or several; find_files.py says what they may hold.
      text_field: the field of a JSON line that is the document.
      weight_field: the field with its weight, or None for a weight of 1.
      validation_share: share of the documents that is held out.
      name: name of the source.
      settings: what the user calls all this, for the messages.

    Raises:
      UserError: as `find_files`.
    """
    self.name = name
    self.files = find_files(globs, settings.files)
    self._globs = globs
    self._fields = Fields(text_field, weight_field)
    self._validation_share = validation_share
    self._settings = settings
    self._start_counting()

  @property
  def num_bytes(self) -> int | None:
    """Size of all files, or None where some are compressed."""
    if any(file.compression for file in self.files):
      return None
    return sum(file.num_bytes for file in self.files)

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the files' bytes, their order and the settings.

    Files may move or be touched without another fingerprint, as long as they
    stay in the same order.
    """
    kinds = [file.is_json_lines for file in self.files]
    contents = (digests or FileDigests()).read(self.files)
    parts = (
      self._validation_share,
      tuple(self._fields) if any(kinds) else None,
      *zip(kinds, contents, strict=True),
    )
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()

  def check_vocabulary(self, sha256: str | None) -> None:
    """Does nothing: any vocabulary can encode text."""

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document); reads everything anew.

    Raises:
      UserError: a file cannot be read or is damaged, a JSON line is broken, or
        there is no text in all files.
    """
    self._start_counting()
    found = False
    for file in self.files:
      for document in self._read(file):
        found = True
        held_out = document.rank < self._validation_share
        yield VALIDATION if held_out else TRAIN, document
    if not found:
      raise UserError(
        f"{self._settings.files} = {self._globs!r}: none of "
        f"{len(self.files):,} files is text{self._skipped_files}"
        f"{self._skipped_lines}."
      )

  def report_skipped(self) -> None:
    """Warns of what the latest reading left out, and names the first."""
    if count := self._skipped_files.count:
      _logger.warning(
        f"{count:,} of {len(self.files):,} files left out{self._skipped_files}."
      )
    if count := self._skipped_lines.count:
      _logger.warning(f"{count:,} JSON lines left out{self._skipped_lines}.")

  def _start_counting(self) -> None:
    self._skipped_files = _Skipped("not UTF-8, or with NUL bytes")
    self._skipped_lines = _Skipped("text with a NUL or half a surrogate pair")

  def _read(self, file: TextFile) -> Iterator[Document]:
    if file.is_json_lines:
      lines = read_json_lines(file, self._fields, self._settings)
      for number, text, weight in lines:
        if not _is_text(text):
          self._skipped_lines.add(f"{file.path}, line {number:,}")
        elif text:
          yield Document(text, weight=weight)
      return
    text = _decode(read_file(file, self._settings))
    if text is None:
      self._skipped_files.add(file.path)
    elif text:
      yield Document(text)


@dataclasses.dataclass
class _Skipped:
  """Counts what is left out; as a text, why, and the first of it."""

  why: str
  count: int = 0
  first: str = ""

  def add(self, where: str) -> None:
    self.count += 1
    self.first = self.first or where

  def __str__(self):
    return f" ({self.why}, such as {self.first})" if self.count else ""


def _decode(content: bytes) -> str | None:
  """Returns the text, or None for what is not text."""
  if b"\0" in content:
    return None
  try:
    return content.decode("utf-8")
  except UnicodeDecodeError:
    return None


def _is_text(text: str) -> bool:
  """Whether a JSON text can be written as UTF-8 and has no NUL."""
  try:
    text.encode()
  except UnicodeEncodeError:
    return False
  return "\0" not in text
