# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Contents of text files: the whole file, or the texts of its JSON lines."""

from collections.abc import Iterator
from typing import NamedTuple

from palm_mtf import user_text
from palm_mtf.data.sources.find_files import TextFile, check_unchanged
from palm_mtf.errors import UserError, did_you_mean
from palm_mtf.user_text import shown

_MAX_WEIGHT = 2**53  # a float holds every whole number below it


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
  content = user_text.read_bytes(file.path, _place(file, settings))
  check_unchanged(file)
  return content


def read_jsonl_texts(
  file: TextFile, fields: Fields, settings: Settings
) -> Iterator[Line]:
  """Yields every line that is not blank; one is in memory at a time.

  Raises:
    UserError: the file cannot be read or is damaged, or a line is broken or
      lacks a field; names file and line.
  """
  fix = "a .jsonl file has one JSON object on each line"
  lines = user_text.read_json_lines(file.path, _place(file, settings), fix)
  for number, where, found in lines:
    yield Line(
      number,
      _text(found, fields.text, where, settings),
      _weight(found, fields.weight, where, settings),
      _quality(found, fields.quality, where, settings),
    )
  check_unchanged(file)


def _place(file: TextFile, settings: Settings) -> str:
  return f"{settings.files}: {file.path}"


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
      f"{where}: {name!r} is {shown(text)}, not a text; set "
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
      f"{where}: {name!r} is {shown(weight)}, not a number of at least 0; set "
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
      f"{where}: {name!r} is {shown(quality)}, not a number; set "
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
