# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The source of TEXT_FILES: text files and files of JSON lines.

A text file is one document, kept byte for byte. In a file of JSON lines, each
line is a document. user_text.py says which files these are. If the first JSON
line has a list "messages", all documents are conversations; if it has "chosen"
and "rejected", all are pairs.
"""

import dataclasses
import functools
import logging
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from palm_mtf import user_text
from palm_mtf.config import DataConfig
from palm_mtf.data.sources.attributes import Attributes, find_attributes
from palm_mtf.data.sources.conversation import (
  ANSWERS,
  MESSAGES,
  TEXTS,
  read_fields,
)
from palm_mtf.data.sources.document import (
  SPLITS,
  Document,
  Source,
  conversation_document,
  decode_text,
  hash_parts,
)
from palm_mtf.data.sources.files import (
  FileDigests,
  TextFile,
  check_unchanged,
  describe_file,
  find_files,
)
from palm_mtf.errors import UserError, did_you_mean

_logger = logging.getLogger(__name__)

# Weights must be below this, because float64 does not hold all higher integers:
# the number of times that a document is read would be rounded.
_MAX_WEIGHT = 2**53


class Settings(NamedTuple):
  """Names of the settings that error messages tell the user to change."""

  files: str
  text_field: str
  weight_field: str
  quality_field: str = "QUALITY_FIELD"


MACROS = Settings("TEXT_FILES", "TEXT_FIELD", "WEIGHT_FIELD")


class Fields(NamedTuple):
  """The names of the fields to read from each JSON line."""

  text: str
  weight: str | None = None  # None for a weight of 1
  quality: str | None = None  # score for filters; None for no score
  conditions: Sequence[str] = ()  # ATTRIBUTE_FILTERS


def open_sources(
  data: DataConfig, sequence_length: int | None = None
) -> list[Source]:
  """Returns the sources of TASK or, if TASK is None, of TEXT_FILES.

  Raises UserError if files are missing, or TASK is not a registered task.
  """
  if data.task is None:
    return [
      TextFiles(
        data.text_files,
        Fields(
          *(data.text_field, data.weight_field, data.filters.quality_field),
          data.filters.attribute_filters,
        ),
        validation_share=data.validation_share,
      )
    ]
  # Import SeqIO's module only for a TASK, because it needs TensorFlow.
  from palm_mtf.data.sources.seqio_task import open_task

  return open_task(data.task, data.validation_share, sequence_length)


class TextFiles:
  """A Source of documents from files, in the order of the files' paths.

  Empty documents are skipped silently. Files and JSON lines that are not text
  are skipped and counted (`report_skipped`).
  """

  rate = 1.0

  def __init__(
    self,
    globs: str | Sequence[str],
    fields: Fields,
    *,
    validation_share: float,
    name: str = "text_files",
    settings: Settings = MACROS,
  ):
    """Finds the files.

    Args:
      globs: one glob or several; see files.py.
      fields: names of the fields of a JSON line.
      validation_share: share of the documents that are held out.
      name: name of the source.
      settings: names of the user's settings, for messages.

    Raises:
      UserError: `find_files` fails, or `fields` has a quality and a file is
        not .jsonl.
    """
    self.name = name
    self.files = find_files(globs, settings.files)  # sorted by path
    self._globs = globs
    self._fields = fields
    self._validation_share = validation_share
    self._settings = settings
    self._start_counting()
    plain = [file.path for file in self.files if not file.is_json_lines]
    if fields.quality is not None and plain:
      raise UserError(
        f"{settings.quality_field} = {fields.quality!r}: {plain[0]} has no "
        f"fields; give only .jsonl files, or set it to None."
      )

  @functools.cached_property
  def form(self) -> str:
    """The form of all documents: that of the first JSON line."""
    for file in self.files:
      if file.is_json_lines:
        for _, document in self._read_lines(file):
          return document.form
    return TEXTS

  @property
  def has_inputs(self) -> bool:
    """Whether documents have inputs: conversations have questions."""
    return self.form != TEXTS

  @property
  def num_bytes(self) -> int | None:
    """Size of all text in bytes; None if any file is compressed."""
    # The decompressed size of a file is known only after reading it.
    if any(file.compression for file in self.files):
      return None
    return sum(file.num_bytes for file in self.files)

  def fingerprint(self, digests: FileDigests | None = None) -> str:
    """Returns a hash of the files' bytes, their order and the settings."""
    # Leave out paths and times. Otherwise moved or touched files would not
    # match their cached tokens. The hash changes with the order of the files.
    kinds = [file.is_json_lines for file in self.files]
    contents = zip(
      kinds, (digests or FileDigests()).read(self.files), strict=True
    )
    # Leave out the quality field, because only filters read it, and the
    # fingerprint of filters includes it.
    fields = (self._fields.text, self._fields.weight) if any(kinds) else None
    attributes = [
      describe_file(path, "ATTRIBUTE_FILTERS")
      for file in self.files
      for path, _ in find_attributes(file.path, self._fields.conditions)
    ]
    contents = (*contents, *(digests or FileDigests()).read(attributes))
    return hash_parts((self._validation_share, fields, *contents))

  def check_vocabulary(self, sha256: str | None) -> None:
    """Does nothing, because any vocabulary can encode text."""

  def documents(self) -> Iterator[tuple[str, Document]]:
    """Yields (split, document); see `Source`."""
    # Check all files first, so that most errors come before hours of reading.
    for file in self.files:
      if file.is_json_lines:
        next(self._read_lines(file), None)
      else:
        user_text.check_plain_text(*self._name(file))
    self._start_counting()
    found = False
    for file in self.files:
      for where, document in self._read(file):
        if document.form != self.form:
          raise UserError(
            f"{where}: has {document.form}, and the first JSON line has "
            f"{self.form}; give all documents one form, or mix tasks by a "
            "SeqIO mixture."
          )
        found = True
        yield SPLITS[document.rank < self._validation_share], document
    if not found:
      raise UserError(
        f"{self._settings.files} = {self._globs!r}: none of "
        f"{len(self.files):,} files is text{self._skipped_files}"
        f"{self._skipped_lines}."
      )

  def report_skipped(self) -> None:
    """Warns how many files and lines were skipped; names the first of each."""
    if count := self._skipped_files.count:
      _logger.warning(
        f"{count:,} of {len(self.files):,} files left out{self._skipped_files}."
      )
    if count := self._skipped_lines.count:
      _logger.warning(f"{count:,} JSON lines left out{self._skipped_lines}.")

  def _start_counting(self) -> None:
    self._skipped_files = _Skipped("not UTF-8, or with NUL bytes")
    self._skipped_lines = _Skipped("text with a NUL or half a surrogate pair")

  def _name(self, file: TextFile) -> tuple[str, str]:
    """Returns arguments for user_text.py: path, and start of error messages."""
    path = user_text.TEXT_PREFIX * file.is_text + file.path
    return path, f"{self._settings.files}: {file.path}"

  def _read_lines(self, file: TextFile) -> Iterator[tuple[int, Document]]:
    return read_jsonl_texts(file, self._fields, self._settings)

  def _read(self, file: TextFile) -> Iterator[tuple[str, Document]]:
    """Yields (file and line for messages, document)."""
    path, name = self._name(file)
    if file.is_json_lines:
      for number, document in self._read_lines(file):
        # Skip a text with a NUL, or with half a surrogate pair (JSON can escape
        # it, but UTF-8 cannot encode it).
        if not user_text.is_text(document.text):
          self._skipped_lines.add(f"{file.path}, line {number:,}")
        elif document.text:
          yield f"{name}, line {number:,}", document
      return
    text = decode_text(user_text.read_bytes(path, name))
    check_unchanged(file)
    if text is None:
      self._skipped_files.add(file.path)
    elif text:
      yield name, Document(text)


@dataclasses.dataclass
class _Skipped:
  """Counts skipped files or lines; str(self) has the reason and an example."""

  why: str
  count: int = 0
  first: str = ""

  def add(self, where: str) -> None:
    self.count += 1
    self.first = self.first or where

  def __str__(self):
    return f" ({self.why}, such as {self.first})" if self.count else ""


def read_jsonl_texts(
  file: TextFile, fields: Fields, settings: Settings
) -> Iterator[tuple[int, Document]]:
  """Yields (line number from 1, document) for each line that is not blank.

  Raises UserError if the file cannot be read or is damaged, or a line is
  invalid or lacks a field; the message names file and line.
  """
  what = f"{settings.files}: {file.path}"
  lines = user_text.read_json_lines(file.path, what, user_text.JSON_LINES)
  attributes = Attributes(file.path, fields.conditions)
  for number, where, line in lines:
    is_conversation = _has_messages(line, where, fields.text)
    values = {
      kind: _read_field(kind, line, name, where, settings)
      for kind in _KINDS
      if (name := getattr(fields, kind)) is not None
      and not (is_conversation and kind == "text")
    }
    values["is_excluded"] = attributes.exclude(line, where)
    if is_conversation:
      conversation = read_fields(line, where)
      yield number, conversation_document(conversation, **values)
    else:
      yield number, Document(**values)
  attributes.exclude({}, f"{what}, after its last line,")
  check_unchanged(file)


def _has_messages(line: dict[str, Any], where: str, text_field: str) -> bool:
  """Returns whether a line is a conversation; UserError if also a text."""
  is_pair = text_field not in line and not {*ANSWERS}.isdisjoint(line)
  if not is_pair and MESSAGES not in line:
    return False
  is_list = is_pair or isinstance(line[MESSAGES], list)
  others = {text_field, "inputs", "targets"} & {*line} - {MESSAGES}
  if is_list and others:
    raise UserError(
      f"{where}: has {MESSAGES!r} and {min(others)!r}; leave out one of them."
    )
  if is_list and line.get("functions"):
    raise UserError(
      f"{where}: has 'functions', which templates do not read; write them as "
      "'tools', in OpenAI's form."
    )
  return is_list or (text_field != MESSAGES and not others)


def _is_number(value: object) -> bool:
  return type(value) in (int, float) and value == value  # False for NaN


# {kind of field in a JSON line: (function that says whether a value is valid,
# and for messages: what is valid, and what else the field's setting may be)}
_KINDS = {
  "text": (lambda x: isinstance(x, str), "a text", ""),
  "weight": (
    lambda x: _is_number(x) and 0 <= x < _MAX_WEIGHT,
    "a number of at least 0",
    ", or to None",
  ),
  "quality": (_is_number, "a number", ""),
}


def _read_field(
  kind: str, line: dict[str, Any], name: str, where: str, settings: Settings
) -> Any:
  """Returns a field's value; raises UserError if it is missing or wrong."""
  is_right, wanted, instead = _KINDS[kind]
  setting = getattr(settings, f"{kind}_field")
  if name not in line:
    has = f"has {', '.join(map(repr, line))}" if line else "is empty"
    raise UserError(
      f"{where}: no field {name!r}{did_you_mean(name, line)}; it {has}; set "
      f"{setting}, or mend the line."
    )
  if not is_right(line[name]):
    raise UserError(
      f"{where}: {name!r} is {user_text.short_json(line[name])}, not "
      f"{wanted}; set {setting} to the field that holds the {kind}{instead}, "
      "or mend the line."
    )
  return line[name]
