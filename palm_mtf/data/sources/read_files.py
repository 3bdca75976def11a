# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Contents of text files: the whole file, or the texts of its JSON lines."""

import bz2
import codecs
import contextlib
import gzip
import json
import lzma
import zlib
from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from palm_mtf.data.sources.find_files import TextFile, check_unchanged
from palm_mtf.errors import UserError, did_you_mean

# Decompression happens as the file is read, in memory.
_OPENERS = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_MAX_WEIGHT = 2**53  # a float holds every whole number below it
# Of a missing file, of one cut short, and of damaged .gz and .xz files.
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)


class Settings(NamedTuple):
  """Names of the user's settings, for messages."""

  files: str
  text_field: str
  weight_field: str
  quality_field: str = "QUALITY_FIELD"


MACROS = Settings("TEXT_FILES", "TEXT_FIELD", "WEIGHT_FIELD")


class Fields(NamedTuple):
  """Fields of a JSON line that are read."""

  text: str
  weight: str | None = None  # None for a weight of 1
  quality: str | None = None  # None for no quality


class Line(NamedTuple):
  """A JSON line."""

  number: int  # in its file, from 1 on
  text: str
  weight: float
  quality: float | None


def read_file(file: TextFile, settings: Settings) -> bytes:
  """Returns the content of a file, decompressed.

  Raises:
    UserError: the file cannot be read, or is damaged; names it.
  """
  try:
    with _open(file) as content:
      return content.read()
  except _READ_ERRORS as error:
    raise _explain_read_error(error, file, settings) from None


def read_jsonl_texts(
  file: TextFile, fields: Fields, settings: Settings
) -> Iterator[Line]:
  """Yields every line that is not blank; one is in memory at a time.

  Raises:
    UserError: the file cannot be read or is damaged, or a line is broken or
      lacks a field; names file and line.
  """
  number = 0
  try:
    with _open(file) as lines:
      for number, line in enumerate(lines, 1):
        if number == 1:
          line = line.removeprefix(codecs.BOM_UTF8)  # Windows writes one
        if line.strip():
          where = f"{settings.files}: {file.path}, line {number:,}"
          found = _parse(line, where)
          yield Line(
            number,
            _text(found, fields.text, where, settings),
            _weight(found, fields.weight, where, settings),
            _quality(found, fields.quality, where, settings),
          )
  except _READ_ERRORS as error:
    raise _explain_read_error(error, file, settings, number) from None


@contextlib.contextmanager
def _open(file: TextFile) -> Iterator[BinaryIO]:
  with _OPENERS[file.compression](file.path, "rb") as content:
    yield content
  check_unchanged(file)


def _explain_read_error(
  error: Exception, file: TextFile, settings: Settings, line: int = 0
) -> UserError:
  where = f"{settings.files}: {file.path}"
  if isinstance(error, OSError) and error.strerror:
    return UserError(f"{where}: {error.strerror}.")
  # Decompressors raise errors without errno.
  after = f" after line {line:,}" if line else ""
  return UserError(
    f"{where}: damaged or cut short{after}: {error}; copy or compress the "
    f"{file.compression} file anew."
  )


def _parse(line: bytes, where: str) -> dict[str, object]:
  fix = "a .jsonl file has one JSON object on each line"
  try:
    parsed = json.loads(line.rstrip().decode("utf-8"))
  except UnicodeDecodeError as error:
    raise UserError(
      f"{where}: not UTF-8, byte 0x{line[error.start]:02x} at column "
      f"{error.start + 1:,}; convert the file to UTF-8, or mend the line."
    ) from None
  except json.JSONDecodeError as error:
    raise UserError(
      f"{where}: not JSON: {error.msg} at column {error.colno:,}; {fix}."
    ) from None
  except (RecursionError, ValueError) as error:  # nested deep, a huge number
    raise UserError(f"{where}: not readable JSON: {error}; {fix}.") from None
  if not isinstance(parsed, dict):
    raise UserError(f"{where}: {_shown(parsed)} is no JSON object; {fix}.")
  return parsed


def _field(
  line: dict[str, object], name: str, where: str, setting: str
) -> object:
  if name not in line:
    has = f"has {', '.join(map(repr, line))}" if line else "is empty"
    raise UserError(
      f"{where}: no field {name!r}{did_you_mean(name, line)}; it {has}; set "
      f"{setting}, or mend the line."
    )
  return line[name]


def _text(
  line: dict[str, object], name: str, where: str, settings: Settings
) -> str:
  text = _field(line, name, where, settings.text_field)
  if not isinstance(text, str):
    raise UserError(
      f"{where}: {name!r} is {_shown(text)}, not a text; set "
      f"{settings.text_field} to the field that holds the text, or mend the "
      "line."
    )
  return text


def _weight(
  line: dict[str, object], name: str | None, where: str, settings: Settings
) -> float:
  if name is None:
    return 1.0
  weight = _field(line, name, where, settings.weight_field)
  if not _is_number(weight) or not 0 <= weight < _MAX_WEIGHT:
    raise UserError(
      f"{where}: {name!r} is {_shown(weight)}, not a number of at least 0; set "
      f"{settings.weight_field} to the field that holds the weight, or to "
      "None, or mend the line."
    )
  return float(weight)


def _quality(
  line: dict[str, object], name: str | None, where: str, settings: Settings
) -> float | None:
  if name is None:
    return None
  quality = _field(line, name, where, settings.quality_field)
  if not _is_number(quality):
    raise UserError(
      f"{where}: {name!r} is {_shown(quality)}, not a number; set "
      f"{settings.quality_field} to the field that holds the quality, or mend "
      "the line."
    )
  return quality


def _is_number(value: object) -> bool:
  return (
    isinstance(value, (int, float))
    and not isinstance(value, bool)
    and value == value  # NaN is not
  )


def _shown(value: object) -> str:
  text = json.dumps(value)
  return text if len(text) <= 40 else f"{text[:36]} ..."
