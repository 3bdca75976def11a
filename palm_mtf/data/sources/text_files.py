# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The source of TEXT_FILES: files of text and of JSON lines.

A file is one document, kept byte for byte; in a .jsonl file each line is one.
"""

import dataclasses
import hashlib
import logging
from collections.abc import Iterator, Sequence

from palm_mtf.data.sources.document import SPLITS, Document, decode_text
from palm_mtf.data.sources.file_hashes import FileDigests
from palm_mtf.data.sources.find_files import TextFile, find_files
from palm_mtf.data.sources.read_files import (
  MACROS,
  Fields,
  Settings,
  read_file,
  read_jsonl_texts,
)
from palm_mtf.errors import UserError
from palm_mtf.user_text import is_text

_logger = logging.getLogger(__name__)


class TextFiles:
  """A Source of the documents of files, in the order of their paths.

  Empty documents are left out silently; files and JSON lines that are not text
  are counted for `report_skipped`.
  """

  rate = 1.0
  has_inputs = False

  def __init__(
    self,
    globs: str | Sequence[str],
    *,
    text_field: str = "text",
    weight_field: str | None = None,
    quality_field: str | None = None,
    validation_share: float,
    name: str = "text_files",
    settings: Settings = MACROS,
  ):
    """Finds the files.

    Args:
      globs: one glob or several; see find_files.py.
      text_field: field of a JSON line with the document.
      weight_field: field with its weight, or None for a weight of 1.
      quality_field: field with its quality, or None; every file is then one of
        JSON lines.
      validation_share: share of the documents that is held out.
      name: name of the source.
      settings: names of the user's settings, for messages.

    Raises:
      UserError: as `find_files`, or a file has no JSON lines for
        `quality_field`.
    """
    self.name = name
    self.files = find_files(globs, settings.files)  # sorted by path
    self._globs = globs
    self._fields = Fields(text_field, weight_field, quality_field)
    self._validation_share = validation_share
    self._settings = settings
    self._start_counting()
    plain = [file.path for file in self.files if not file.is_json_lines]
    if quality_field is not None and plain:
      raise UserError(
        f"{settings.quality_field} = {quality_field!r}: {plain[0]} has no "
        f"fields; give .jsonl files alone, or set it to None."
      )

  @property
  def num_bytes(self) -> int | None:
    """Size of all files, or None where some are compressed."""
    # For progress bars and full disks, which need the size of the text itself.
    if any(file.compression for file in self.files):
      return None
    return sum(file.num_bytes for file in self.files)

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the files' bytes, their order and the settings."""
    # Neither paths nor times: tokens are found again where files have moved
    # or were touched, as long as their order stays.
    kinds = [file.is_json_lines for file in self.files]
    contents = (digests or FileDigests()).read(self.files)
    # A quality changes no document; the filter that reads it has its field.
    fields = (self._fields.text, self._fields.weight)
    parts = (
      self._validation_share,
      fields if any(kinds) else None,
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
        yield SPLITS[document.rank < self._validation_share], document
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
      lines = read_jsonl_texts(file, self._fields, self._settings)
      for number, text, weight, quality in lines:
        # A JSON escape may be half a surrogate pair, which has no UTF-8.
        if not is_text(text):
          self._skipped_lines.add(f"{file.path}, line {number:,}")
        elif text:
          yield Document(text, weight=weight, quality=quality)
      return
    text = decode_text(read_file(file, self._settings))
    if text is None:
      self._skipped_files.add(file.path)
    elif text:
      yield Document(text)


@dataclasses.dataclass
class _Skipped:
  """A count of what is left out; as a text, why, and the first of it."""

  why: str
  count: int = 0
  first: str = ""

  def add(self, where: str) -> None:
    self.count += 1
    self.first = self.first or where

  def __str__(self):
    return f" ({self.why}, such as {self.first})" if self.count else ""
