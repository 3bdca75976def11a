# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Reads the users' text files, by the same rules for all settings and flags.

names   Case does not matter. A suffix in COMPRESSIONS gives the compression of
        a file. The suffix before it gives the content: .jsonl, .ndjson and
        .json are lines of JSON, .tsv is columns, any other suffix is plain
        text. A pipe has no name, so it is plain text; "-" is stdin. TEXT_PREFIX
        before a name makes the file plain text, whatever its suffix is.
content fits the name: a compression, an archive, a table, or a first line of
        JSON in plain text is refused.
bytes   are UTF-8. A byte order mark, which Windows writes, is dropped at the
        beginning of a file and, because files may be joined, of a line.
lines   end only in a line feed; a carriage return before it is dropped. In JSON
        lines, blank lines and record separators (RFC 7464) before a line are
        skipped. In other files, empty lines at the end are skipped.
JSON    is read as Python reads it: NaN and Infinity are numbers, and if two
        fields have the same name, the last counts.
texts   have no NUL and no half of a surrogate pair.

A file that breaks these rules is refused with a one-line error. But TEXT_FILES
may match files whose bytes are no text; these are counted and left out.
"""

import bz2
import codecs
import contextlib
import gzip
import io
import itertools
import json
import lzma
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NoReturn

from palm_mtf.errors import UserError

COMPRESSIONS = (".gz", ".bz2", ".xz")
TEXT_PREFIX = "text:"
JSON_LINES = (
  "write one JSON object on each line, or, to read the file as one text, put "
  f"'{TEXT_PREFIX}' before its name"
)

_OTHER_COMPRESSIONS = (".zst", ".zstd", ".lz4", ".lzma", ".br", ".lzo", ".z")
# {suffix: function that opens such a file and decompresses what is read}.
_OPENERS = {"": open, ".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
# Errors for missing, unreadable, truncated and damaged files.
_READ_ERRORS = (OSError, EOFError, zlib.error, lzma.LZMAError)
# The first bytes of files that are not plain UTF-8 text. No text begins with
# them, at least not by chance. UTF-32 comes before UTF-16, because its
# little-endian byte order mark begins with UTF-16's.
_ENCODINGS = {
  "UTF-32": rb"\xff\xfe\0\0|\0\0\xfe\xff",
  "UTF-16": rb"\xff\xfe|\xfe\xff|([\t-~]\0){4}|(\0[\t-~]){4}",
}
_COMPRESSED = {
  ".gz": rb"\x1f\x8b",
  ".xz": rb"\xfd7zXZ\0",
  ".bz2": rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)",
}
_CONTAINERS = {
  "a .zst file": rb"\x28\xb5\x2f\xfd",
  "an .lz4 file": rb"\x04\x22\x4d\x18",
  "an .lzma file": rb"\x5d\0\0.{2}",
  "a .Z file": rb"\x1f\x9d",
  "a Parquet file": rb"PAR1[\0-\x08\x0e-\x1f]",
  "an Arrow file": rb"ARROW1\0|\xff{4}.{3}\0",
  "an Avro file": rb"Obj\x01",
  "an ORC file": rb"ORC[\0-\x08]",
  "an SQLite database": rb"SQLite format 3\0",
  "an HDF5 file": rb"\x89HDF",
  "a zip archive": rb"PK(\x03\x04|\x05\x06)",
  "a 7z archive": rb"7z\xbc\xaf",
  "a tar archive": rb".{257}ustar",
}
_ARRAY_LINE = re.compile(rb"\s*\[\s*(\{|$)")  # first line of a JSON array
_JSON_ARRAY = re.compile(rb'\s*\[\s*\{\s*"([^"\\]|\\.)*"\s*:')
_MARK = "\ufeff"
_RECORD_SEPARATOR = b"\x1e"  # before each JSON text of RFC 7464


def compression_of(path: str) -> str:
  """Returns the suffix in COMPRESSIONS that `path` ends with, or ""."""
  name = path.lower()
  return next((x for x in COMPRESSIONS if name.endswith(x)), "")


def format_of(path: str) -> str:
  """Returns ".jsonl", ".tsv" or, for plain text, "", from the file's name."""
  if path.startswith(TEXT_PREFIX):
    return ""
  name = path.lower().removesuffix(compression_of(path))
  if name.endswith((".jsonl", ".ndjson", ".json")):
    return ".jsonl"
  return ".tsv" if name.endswith(".tsv") else ""


def check_compression(path: str, what: str) -> None:
  """Raises UserError if `path` has the suffix of an unsupported compression."""
  if path.lower().endswith(_OTHER_COMPRESSIONS):
    raise UserError(
      f"{what}: this compression is not supported, only "
      f"{', '.join(COMPRESSIONS)}; compress the text in one of these, or leave "
      "the file out."
    )


def check_plain_text(path: str, what: str) -> None:
  """Raises UserError if the beginning of a file cannot be read as plain text.

  Arguments are those of `read_bytes`. Invalid UTF-8 and NULs are permitted.
  """
  with _open(path, what) as file:
    _check_plain_text(file, path, what)


def read_bytes(path: str, what: str) -> bytes:
  """Returns the content of a file, decompressed; the path "-" is stdin.

  `what` is the setting and its file, for the beginning of messages.

  Raises UserError if the file cannot be read, is a folder, a device or damaged.
  """
  with _open(path, what) as file:
    return file.read()


def read_text(
  path: str, what: str, needed: str | None, *, keeps_mark: bool = False
) -> str:
  """Returns the text of a file, decompressed; keeps its line ends.

  Args:
    needed: advice for messages if the file is empty, such as "write one prompt
      per line"; None for a file of code, which may be empty and holds no JSON
      lines.
    keeps_mark: whether to keep a byte order mark at the start of the text.

  Raises UserError if the file cannot be read, is damaged or not text, or is
  empty although `needed` is given.
  """
  content = read_bytes(path, what)
  if needed:
    _check_plain_text(io.BytesIO(content), path, what)
  else:
    _check_magic(content, what)
  text = _decode(content, what)
  text = text if keeps_mark else text.removeprefix(_MARK)
  if not text and needed:
    raise UserError(f"{what}: is empty; {needed}.")
  return text


def read_lines(
  path: str, what: str, needed: str
) -> Iterator[tuple[int, str, str]]:
  """Yields (number from 1, "WHAT, line NUMBER", text) for each line.

  Leaves out empty lines at the end; arguments are those of `read_text`. Raises
  UserError if the file cannot be read, is damaged or not text, or has no lines.
  """
  lines = split_lines(read_text(path, what, needed))
  while lines and not lines[-1]:
    lines.pop()
  if not lines:
    raise UserError(f"{what}: is empty; {needed}.")
  for number, line in enumerate(lines, 1):
    yield number, f"{what}, line {number:,}", line


def split_lines(text: str) -> list[str]:
  """Returns the lines of a text without line ends and byte order marks."""
  return [
    line.removesuffix("\r").removeprefix(_MARK)
    for line in text.removesuffix("\n").split("\n")
  ]


def read_json_lines(
  path: str, what: str, fix: str, *, needed: str | None = None
) -> Iterator[tuple[int, str, dict[str, object]]]:
  """Yields (number from 1, "WHAT, line NUMBER", JSON object) for each line.

  Blank lines are left out. Only one line of the file is in memory at a time.
  For `path` and `what` see `read_bytes`. `fix` is advice for messages about a
  line that is not a JSON object, and `needed` if all lines are blank; None
  permits that.

  Raises UserError if the file cannot be read, is a folder, a device or damaged,
  or a line is not a JSON object.
  """
  number, is_blank = 0, True
  with _open(path, what, lambda: number) as lines:
    for number, line in enumerate(lines, 1):
      if number == 1:
        _check_magic(line, what)
      line = line.removeprefix(codecs.BOM_UTF8).lstrip(_RECORD_SEPARATOR)
      if line.strip():
        if is_blank and _ARRAY_LINE.match(line):
          _refuse_array(what)
        is_blank = False
        fields = _parse(line, what, number, fix)
        yield number, f"{what}, line {number:,}", fields
  if is_blank and needed:
    raise UserError(f"{what}: is empty; {needed}.")


def check_text(value: object, what: str, fix: str) -> str:
  """Returns a value in the user's JSON if it is a valid text.

  `what` is the value's line and field, for the beginning of messages; `fix` is
  advice for messages about a value of another type.

  Raises UserError if it is no text, or has a NUL or half of a surrogate pair.
  """
  if not isinstance(value, str):
    raise UserError(f"{what} is {short_json(value)}, not a text; {fix}.")
  if fault := _find_fault(value):
    raise UserError(f"{what} has {fault}; leave it out.")
  return value


def is_text(value: str) -> bool:
  """Returns whether a text has neither a NUL nor half of a surrogate pair."""
  return not _find_fault(value)


def _find_fault(text: str) -> str:
  if "\0" in text:
    return "a NUL, which a text cannot have"
  try:
    text.encode()
  except UnicodeEncodeError as error:
    half = ascii(text[error.start])[1:-1]
    return f"half of a surrogate pair, {half}, which is not a character"
  return ""


def short_json(value: object) -> str:
  """Returns a value as JSON for a message, truncated to 40 characters."""
  text = json.dumps(value)
  return text if len(text) <= 40 else f"{text[:36]} ..."


@contextlib.contextmanager
def _open(
  path: str, what: str, find_line: Callable[[], int] = lambda: 0
) -> Iterator[BinaryIO]:
  # `find_line` returns the number of the last line that was read, for messages
  # about errors of the system and of decompressors while the file is read.
  try:
    with _open_unchecked(path, what) as file:
      yield file
  except _READ_ERRORS as error:
    if isinstance(error, OSError) and error.strerror:
      raise UserError(f"{what}: {error.strerror}; give a text file.") from None
    # An error without a system message comes from a decompressor.
    suffix, line = compression_of(path), find_line()
    after = f" after line {line:,}" if line else ""
    fix = f"copy or compress the {suffix} file again"
    if not line:
      fix += f", or name it without {suffix} if it is not compressed"
    raise UserError(
      f"{what}: damaged or cut short{after}: {error}; {fix}."
    ) from None


@contextlib.contextmanager
def _open_unchecked(path: str, what: str) -> Iterator[BinaryIO]:
  check_compression(path, what)
  path = path.removeprefix(TEXT_PREFIX)
  if path == "-":
    with open(0, "rb", closefd=False) as content:
      yield content
    return
  path = os.path.expanduser(path)
  try:
    mode = os.stat(path).st_mode
  except ValueError:  # a NUL, or half of a surrogate pair
    raise UserError(f"{what}: no file has such a name.") from None
  if stat.S_ISDIR(mode):
    raise UserError(f"{what}: is a folder; name a file in it.")
  with _OPENERS[compression_of(path)](path, "rb") as content:
    # Refuse devices, because /dev/zero, for example, has no end. Accept a
    # terminal, because the user ends its text with Ctrl-D.
    is_device = stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
    if is_device and not os.isatty(content.fileno()):
      raise UserError(f"{what}: is a device; name a file of text.")
    yield content


def _check_magic(content: bytes, what: str) -> None:
  # Raises UserError if the first bytes of a file show another format.
  encoding, suffix, container = (
    next((x for x in formats if re.match(formats[x], content, re.DOTALL)), None)
    for formats in (_ENCODINGS, _COMPRESSED, _CONTAINERS)
  )
  if encoding:
    raise UserError(f"{what}: is {encoding}; convert the file to UTF-8.")
  if suffix:
    raise UserError(
      f"{what}: is compressed, and its name does not say so; let it end in "
      f"{suffix}, or decompress it."
    )
  if container:
    raise UserError(
      f"{what}: is {container}, not text; convert it to text or JSON lines, or "
      "leave it out."
    )


def _check_plain_text(lines: Iterable[bytes], path: str, what: str) -> None:
  # Raises UserError if the first lines of a plain text are another format.
  unmarked = (line.lstrip(codecs.BOM_UTF8) for line in lines)
  filled = (line for line in unmarked if line.strip())
  # Look at three lines, because an array's objects may begin in the third.
  lines = [*itertools.islice(filled, 3)]
  beginning = b"".join(lines)
  _check_magic(beginning, what)
  if path.startswith(TEXT_PREFIX):
    return
  if lines and _has_json_objects(lines[0]):
    raise UserError(
      f"{what}: begins with a line of JSON, and its name says plain text; let "
      f"it end in .jsonl{compression_of(path)} if it holds JSON lines, or, to "
      f"read it as text, put '{TEXT_PREFIX}' before its name."
    )
  if _JSON_ARRAY.match(beginning):
    _refuse_array(what)


def _has_json_objects(line: bytes) -> bool:
  # Returns whether a line is a JSON object, or begins with two objects.
  between = " \t\r\n,\x1e"  # what may separate objects
  try:
    text = line.decode().lstrip(between)
    # Python converts integers of at most 4,300 digits, so do not convert them.
    value, end = json.JSONDecoder(parse_int=str).raw_decode(text)
  except (ValueError, RecursionError):
    return False
  return isinstance(value, dict) and text[end:].lstrip(between)[:1] in ("", "{")


def _refuse_array(what: str) -> NoReturn:
  raise UserError(
    f"{what}: is one JSON array; {JSON_LINES} (`jq -c '.[]'` makes lines of an "
    "array)."
  )


def _decode(content: bytes, what: str, number: int = 1) -> str:
  # Raises UserError with the place of a byte that is not UTF-8, or a NUL. The
  # first line of `content` has this number in its file.
  try:
    if b"\0" not in content:
      return content.decode("utf-8")
    # In UTF-16 without a byte order mark, each ASCII character has a NUL.
    position, why = content.index(b"\0"), "a NUL"
    fix = "leave it out, or convert the file from UTF-16 to UTF-8"
  except UnicodeDecodeError as error:
    position = error.start
    why = f"not UTF-8, byte 0x{content[position]:02x}"
    fix = "convert the file to UTF-8, or mend the line"
  number += content.count(b"\n", 0, position)
  column = position - content.rfind(b"\n", 0, position)
  raise UserError(
    f"{what}, line {number:,}: {why} at column {column:,}; {fix}."
  )


def _parse(line: bytes, what: str, number: int, fix: str) -> dict[str, object]:
  text = _decode(line.rstrip(), what, number)
  where = f"{what}, line {number:,}"
  try:
    parsed = json.loads(text)
  except json.JSONDecodeError as error:
    raise UserError(
      f"{where}: not JSON: {error.msg} at column {error.colno:,}; {fix}."
    ) from None
  except (RecursionError, ValueError) as error:  # deep nesting, a huge number
    raise UserError(f"{where}: not readable JSON: {error}; {fix}.") from None
  if not isinstance(parsed, dict):
    raise UserError(f"{where}: {short_json(parsed)} is no JSON object; {fix}.")
  return parsed
