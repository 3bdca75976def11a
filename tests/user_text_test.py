# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""All readers of text that a user writes follow the same rules.

READERS has the readers that need no TensorFlow; tests/tasks/records_test.py
tests the reader of records.
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
import tarfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from palm_mtf.cli.gin_files import make_run_loader
from palm_mtf.cli.gin_folder import find_gin_file
from palm_mtf.cli.gin_statements import read_file as read_gin
from palm_mtf.commands.score import read_items
from palm_mtf.data.sources.text_files import Fields, TextFiles
from palm_mtf.errors import UserError
from palm_mtf.evaluation.few_shot import read_exemplars
from palm_mtf.generation.inference.prompts import read_prompts
from palm_mtf.user_text import compression_of, format_of

COMPRESS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
# Python's splitlines() splits at these characters, but they end no line.
SEPARATORS = "one\x0btwo\x0cthree\x1cfour\x85five\u2028six\u2029seven"
MARK = codecs.BOM_UTF8


class Reader(NamedTuple):
  """A reader: the name of its file, the line for a text, and the function."""

  name: str
  line: Callable[[str], str]
  read: Callable[[str], list[str]]

  @property
  def is_json(self) -> bool:
    return self.name.endswith(".jsonl")


def _targets(path: str) -> list[str]:
  return [text for item in read_items(path) for text in item.targets]


def _training_texts(path: str) -> list[str]:
  source = TextFiles(path, Fields("text"), validation_share=0.5)
  return [document.text for _, document in source.documents()]


def _exemplars(path: str) -> list[str]:
  exemplars = read_exemplars(path, None)
  texts = [text.removeprefix("Q ") for text in exemplars.choose("", "")]
  return texts or exemplars.text.splitlines()


def _gin_values(path: str) -> list[str]:
  return [each.value for each in read_gin(find_gin_file(path))]


def _json_line(**names: str) -> Callable[[str], str]:
  def line(text: str) -> str:
    fields = {name: value or text for name, value in names.items()}
    return json.dumps(fields, ensure_ascii=False)

  return line


READERS = {
  "prompts": Reader("a.txt", str, read_prompts),
  "prompts.jsonl": Reader("a.jsonl", _json_line(prompt=""), read_prompts),
  "score.tsv": Reader("a.tsv", "Q\t{}".format, _targets),
  "score.jsonl": Reader(
    "a.jsonl", _json_line(inputs="Q", targets=""), _targets
  ),
  "texts.jsonl": Reader("a.jsonl", _json_line(text=""), _training_texts),
  "exemplars": Reader("a.txt", str, _exemplars),
  "exemplars.jsonl": Reader(
    "a.jsonl", _json_line(inputs="Q ", targets=""), _exemplars
  ),
  "gin": Reader("a.gin", "A = {!r}".format, _gin_values),
}
TEXTS = ["one", "two caf\u00e9", "three"]
each_reader = pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
each_json_reader = pytest.mark.parametrize(
  "reader",
  [x for x in READERS.values() if x.is_json],
  ids=[name for name, x in READERS.items() if x.is_json],
)


def content_of(reader: Reader, texts=TEXTS, end="\n") -> bytes:
  return "".join(reader.line(text) + end for text in texts).encode()


def write(folder: Path, name: str, content: bytes) -> str:
  path = folder / name
  path.write_bytes(content)
  return str(path)


def refusal(reader: Reader, path: str) -> str:
  """Returns the message of the error that refuses a file."""
  with pytest.raises(UserError) as info:
    reader.read(path)
  message = str(info.value)
  assert path in message or os.path.basename(path) in message
  assert "\n" not in message and message.endswith(".")
  return message


@contextlib.contextmanager
def pipe(content: bytes) -> Iterator[str]:
  """Yields the path of a pipe with this content, as a shell's `<(...)` does."""
  reading, writing = os.pipe()  # holds 64 KiB
  os.write(writing, content)
  os.close(writing)
  yield f"/dev/fd/{reading}"
  os.close(reading)


@each_reader
def test_a_byte_order_mark_is_not_part_of_the_text(tmp_path, reader):
  path = write(tmp_path, reader.name, MARK + content_of(reader))
  assert reader.read(path) == TEXTS


@each_reader
def test_joined_files_each_lose_their_byte_order_mark(tmp_path, reader):
  if reader == READERS["exemplars"]:
    return  # this text is used unchanged
  content = MARK + content_of(reader)
  path = write(tmp_path, reader.name, content * 2)
  assert reader.read(path) == TEXTS * 2


def test_a_document_that_is_scored_is_byte_for_byte_that_of_training(tmp_path):
  content = MARK + b"one\r\ntwo\n"
  path = write(tmp_path, "a.txt", content)
  assert _targets(path) == _training_texts(path) == [content.decode()]


@each_reader
def test_lines_may_end_as_on_windows_and_the_last_not_at_all(tmp_path, reader):
  content = content_of(reader, end="\r\n")
  for each in (content, content.rstrip()):
    assert reader.read(write(tmp_path, reader.name, each)) == TEXTS


@each_reader
@pytest.mark.parametrize("blank", ["\n", "\r\n\r\n", "\n\n\n"])
def test_blank_lines_at_the_end_are_no_lines(tmp_path, reader, blank):
  path = write(tmp_path, reader.name, content_of(reader) + blank.encode())
  assert [text for text in reader.read(path) if text] == TEXTS


@each_json_reader
def test_blank_lines_of_json_lines_count_and_are_skipped(tmp_path, reader):
  content = b" \n\t\r\n".join(content_of(reader, [x]) for x in TEXTS)
  path = write(tmp_path, reader.name, content)
  assert reader.read(path) == TEXTS
  path = write(tmp_path, reader.name, b"\n \n" + content + b"[]\n")
  assert f"line {3 + 3 + 4}: [] is no JSON object" in refusal(reader, path)


@each_reader
def test_only_a_line_feed_ends_a_line(tmp_path, reader):
  texts = [SEPARATORS, "eight\rnine"]
  if reader.is_json:  # JSON has no control characters
    texts = ["one\x85two\u2028three\u2029four"]
  if reader.name == "a.gin":  # the file escapes these characters
    texts = [SEPARATORS]
  path = write(tmp_path, reader.name, content_of(reader, texts))
  if reader == READERS["exemplars"]:
    assert read_exemplars(path, None).text == "\n".join([*texts, ""])
  else:
    assert reader.read(path) == texts


@each_reader
@pytest.mark.parametrize("suffix", COMPRESS)
@pytest.mark.parametrize("is_upper", [False, True])
def test_a_name_says_compression_and_format_in_any_case(
  tmp_path, reader, suffix, is_upper
):
  name = f"{reader.name}{suffix}"
  name = name.upper() if is_upper else name
  content = COMPRESS[suffix](content_of(reader, TEXTS[:1]))
  # `cat` joins two compressed files in this way.
  content += COMPRESS[suffix](content_of(reader, TEXTS[1:]))
  assert reader.read(write(tmp_path, name, content)) == TEXTS


@each_reader
def test_zeros_may_pad_a_gzip_file_and_nothing_else(tmp_path, reader):
  content = gzip.compress(content_of(reader))
  path = write(tmp_path, f"{reader.name}.gz", content + bytes(512))
  assert reader.read(path) == TEXTS
  write(tmp_path, f"{reader.name}.gz", content + b"garbage")
  assert "damaged or cut short" in refusal(reader, path)


@each_reader
@pytest.mark.parametrize("suffix", COMPRESS)
def test_a_name_and_a_content_that_disagree_are_refused(
  tmp_path, reader, suffix
):
  content = content_of(reader)
  path = write(tmp_path, f"{reader.name}{suffix}", content)
  assert refusal(reader, path).endswith(
    f"copy or compress the {suffix} file again, or name it without {suffix} if "
    "it is not compressed."
  )
  path = write(tmp_path, reader.name, COMPRESS[suffix](content))
  assert (
    f"is compressed, and its name does not say so; let it end in {suffix}"
    in (refusal(reader, path))
  )


ARRAY = "is one JSON array; "
TABLE = "not text; convert it to text or JSON lines, or leave it out."
# {content: part of the message}, by the formats' specifications.
OTHER_FORMATS = {
  b"PAR1\x15\x04\x15\x1e": f"is a Parquet file, {TABLE}",
  b"ARROW1\0\0": f"is an Arrow file, {TABLE}",
  b"\xff\xff\xff\xff\x78\x01\0\0": f"is an Arrow file, {TABLE}",
  b"Obj\x01\x04\x14avro.codec": f"is an Avro file, {TABLE}",
  b"SQLite format 3\0\x10\0": f"is an SQLite database, {TABLE}",
  b"PK\x03\x04\x14\0\0\0\x08\0": f"is a zip archive, {TABLE}",
  b"\x28\xb5\x2f\xfd\x04\x58\x09\0": f"is a .zst file, {TABLE}",
  b"\x04\x22\x4d\x18\x64\x40": f"is an .lz4 file, {TABLE}",
  "one".encode("utf-16"): "is UTF-16; convert the file to UTF-8.",
  "three".encode("utf-16-be"): "is UTF-16; convert the file to UTF-8.",
}


def _tar() -> bytes:
  packed = io.BytesIO()
  with tarfile.open(fileobj=packed, mode="w") as archive:
    archive.addfile(tarfile.TarInfo("a.txt"))
  return packed.getvalue()


@each_reader
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_an_archive_or_table_is_refused_by_its_name(tmp_path, reader, pack):
  suffix = ".gz" if pack is gzip.compress else ""
  for content, message in {**OTHER_FORMATS, _tar(): "is a tar archive"}.items():
    path = write(tmp_path, f"{reader.name}{suffix}", pack(content))
    assert message in refusal(reader, path)


@pytest.mark.parametrize("name", ["a.jsonl", "A.NDJSON", "a.json"])
@pytest.mark.parametrize("suffix", ["", *COMPRESS])
def test_a_name_that_says_json_is_read_as_json_lines(tmp_path, name, suffix):
  pack = COMPRESS.get(suffix, bytes)
  for reader in READERS.values():
    if reader.is_json:
      content = MARK + b"\n \n\x1e" + content_of(reader)  # RFC 7464
      path = write(tmp_path, f"{name}{suffix}", pack(content))
      assert reader.read(path) == TEXTS


TEXT_READERS = {
  "prompts": read_prompts,
  "score": _targets,
  "texts": _training_texts,
  "exemplars": _exemplars,
}
each_text_reader = pytest.mark.parametrize(
  "read", TEXT_READERS.values(), ids=TEXT_READERS
)
LINE = '{"text": "one", "inputs": "Q", "targets": "A", "prompt": "P"}'
IS_JSON = (
  "begins with a line of JSON, and its name says plain text; let it end in "
  ".jsonl{} if it holds JSON lines, or, to read it as text, put 'text:' before "
  "its name."
)
JSON_CONTENTS = {
  f"{LINE}\n{LINE}\n": IS_JSON,
  f"{LINE},\n{LINE}": IS_JSON,
  f"{LINE}\r{LINE}\r": IS_JSON,
  f"{LINE} {LINE}": IS_JSON,
  f"\x1e{LINE}\n": IS_JSON,  # RFC 7464
  f'{{"n": 1{"0" * 4300}}} {LINE}\n': IS_JSON,
  f"[{LINE}, {LINE}]": ARRAY,
  f"[\n  {{\n    {LINE[1:]}\n]": ARRAY,
}


@each_text_reader
@pytest.mark.parametrize("suffix", ["", *COMPRESS])
@pytest.mark.parametrize(
  "start", ["", "\ufeff\ufeff", "\n\r\n\ufeff", " \n" * 99]
)
def test_json_under_a_name_of_plain_text_is_refused_unless_it_is_meant(
  tmp_path, read, suffix, start
):
  pack = COMPRESS.get(suffix, bytes)
  cases = itertools.product(
    ["part-00", "a.txt", "a.tsv"], JSON_CONTENTS.items()
  )
  for name, (text, message) in cases:
    content = f"{start}{text}"
    path = write(tmp_path, f"{name}{suffix}", pack(content.encode()))
    with pytest.raises(UserError) as info:
      read(path)
    assert message.format(suffix) in str(info.value)
    if "\n" not in start or read is not read_prompts:  # prompts are not empty
      found = "".join(read(f"text:{path}"))
      words = "".join(LINE.split())  # the reader of a test splits lines
      assert words in "".join(found.split()), (name, text)


@each_text_reader
@pytest.mark.parametrize("name", ["a.jsonl", "a.ndjson", "a.json"])
@pytest.mark.parametrize("text", ["prose", "{\n", "[\n", "[{}]", "PAR1 here"])
def test_plain_text_under_a_name_of_json_is_refused_unless_it_is_meant(
  tmp_path, read, name, text
):
  path = write(tmp_path, name, text.encode())
  with pytest.raises(UserError):
    read(path)
  assert "\n".join(read(f"text:{path}")) == (
    text.strip() if read in (read_prompts, _exemplars) else text
  )


@each_text_reader
@pytest.mark.parametrize(
  "text",
  [
    "{not: json}",
    "{} is a dict",
    "[1] is a note",
    "{'a': 1}",
    '[ {"x"} ]',
    '[{"x" is here}, "x": 1',
    "ORCHARD",
    "PAR1",
    "BZh",
  ],
)
def test_a_text_that_only_resembles_another_format_is_text(
  tmp_path, read, text
):
  assert read(write(tmp_path, "a.txt", text.encode())) == [text]


@each_reader
@pytest.mark.parametrize("suffix", [".zst", ".LZ4", ".Z"])
def test_another_compression_is_refused_with_those_that_are_read(
  tmp_path, reader, suffix
):
  path = write(tmp_path, f"{reader.name}{suffix}", b"packed")
  assert "is not supported, only .gz, .bz2, .xz;" in refusal(reader, path)


@each_reader
@pytest.mark.parametrize(
  ("encoding", "message"),
  [
    ("utf-16", "is UTF-16; convert the file to UTF-8."),
    ("utf-16-be", "is UTF-16; convert the file to UTF-8."),
    ("utf-32", "is UTF-32; convert the file to UTF-8."),
    ("utf-16-le", "is UTF-16; convert the file to UTF-8."),
    ("latin-1", "line 2: not UTF-8, byte 0xe9 at column "),
  ],
)
def test_another_encoding_is_refused_by_its_name(
  tmp_path, reader, encoding, message
):
  content = content_of(reader).decode().encode(encoding)
  if encoding == "utf-16-be":
    content = codecs.BOM_UTF16_BE + content
  assert message in refusal(reader, write(tmp_path, reader.name, content))


@each_reader
def test_a_nul_byte_is_refused_with_its_line(tmp_path, reader):
  content = content_of(reader) + b"\0\0\0\0"
  path = write(tmp_path, reader.name, content)
  assert "line 4: a NUL at column 1; " in refusal(reader, path)


@each_json_reader
@pytest.mark.parametrize(
  ("escape", "message"),
  [
    ("\\ud83d", "half of a surrogate pair, \\ud83d, which is not a character"),
    ("\\u0000", "has a NUL, which a text cannot have; leave it out."),
  ],
)
def test_an_escape_that_is_no_text_is_refused_with_line_and_field(
  tmp_path, reader, escape, message
):
  content = content_of(reader) + content_of(reader, ["x?y"]).replace(
    b"?", escape.encode()
  )
  path = write(tmp_path, reader.name, content)
  if reader.read is _training_texts:  # counts such a text, and leaves it out
    assert reader.read(path) == TEXTS
    return
  assert message in (line := refusal(reader, path))
  assert ", line 4: '" in line


@each_json_reader
def test_a_pair_of_surrogates_is_one_character(tmp_path, reader):
  content = content_of(reader, ["x?y"]).replace(b"?", b"\\ud83d\\ude00")
  path = write(tmp_path, reader.name, content)
  assert reader.read(path) == ["x\U0001f600y"]


@each_json_reader
@pytest.mark.parametrize("value", ["NaN", "-Infinity", "null", '["a"]', "7"])
def test_what_is_no_text_is_shown_as_json_has_it(tmp_path, reader, value):
  content = content_of(reader, ["?"]).replace(b'"?"', value.encode())
  path = write(tmp_path, reader.name, content)
  assert f" is {value}, not a text; " in refusal(reader, path)


@each_json_reader
def test_of_two_fields_of_one_name_the_last_counts(tmp_path, reader):
  content = content_of(reader, ["one"])
  (name,) = [x for x in json.loads(content) if json.loads(content)[x] == "one"]
  content = content.replace(b"{", b'{"%s": "zero", ' % name.encode())
  assert reader.read(write(tmp_path, reader.name, content)) == ["one"]


@each_reader
def test_what_is_no_file_is_refused(tmp_path, reader):
  folder = tmp_path / f"b{reader.name}"
  folder.mkdir()
  assert "a folder; " in refusal(reader, str(folder))
  assert " device" in refusal(reader, "/dev/zero")
  assert "o such file" in refusal(reader, str(tmp_path / "none.txt"))


@each_reader
def test_what_is_read_once_may_be_a_pipe(reader):
  content = content_of(reader)
  with pipe(content) as path:
    if reader.read is _training_texts:
      assert f"{path} is a pipe, a device or a link" in refusal(reader, path)
    elif reader.is_json:  # a pipe has no suffix, so it is plain text
      assert "begins with a line of JSON" in refusal(reader, path)
    elif reader.name == "a.tsv":
      assert content.decode() in "\n".join([*reader.read(path), ""])
    else:
      assert reader.read(path) == TEXTS


@each_reader
def test_a_pipe_with_a_name_is_read_by_its_name(tmp_path, reader):
  path = tmp_path / f"{reader.name}.gz"
  os.mkfifo(path)
  content = gzip.compress(content_of(reader))
  if reader.read is _training_texts:
    assert "is a pipe" in refusal(reader, str(path))
    return
  thread = threading.Thread(target=path.write_bytes, args=(content,))
  thread.start()
  try:
    assert reader.read(str(path)) == TEXTS
  finally:
    thread.join()


@pytest.fixture
def stdin() -> Iterator[Callable[[bytes], None]]:
  """Replaces the stdin of this process."""
  kept = os.dup(0)

  def put(content: bytes) -> None:
    with pipe(content) as path:
      os.dup2(int(os.path.basename(path)), 0)

  yield put
  os.dup2(kept, 0)
  os.close(kept)


@pytest.mark.parametrize("path", ["-", "/dev/stdin"])
def test_a_dash_is_stdin(path, stdin):
  stdin(MARK + b"one\ntwo\n")
  assert read_prompts(path) == ["one", "two"]
  stdin(b"one\ntwo\n")
  assert _targets(path) == ["one\ntwo\n"]


def test_a_sweep_reads_its_gin_files_for_each_run_and_takes_no_pipe():
  with pipe(b"TRAIN_STEPS = 7\n") as path:
    with pytest.raises(UserError) as info:
      make_run_loader([path], [])
    assert str(info.value) == (
      f"--gin_file={path}: is a pipe, and a sweep reads its gin files for "
      "every run; write it to a file."
    )


def test_the_last_suffixes_of_a_name_count():
  names = ["A.JSONL.GZ", "a.tsv.bz2", "a.jsonl.txt", "a.gz.jsonl", "jsonl"]
  assert [format_of(x) for x in names] == [".jsonl", ".tsv", "", ".jsonl", ""]
  assert [compression_of(x) for x in names] == [".gz", ".bz2", "", "", ""]


@pytest.mark.parametrize("path", ["a\0b.txt", "a\ud83d.txt"])
def test_a_name_that_no_file_can_have_is_refused(path):
  with pytest.raises(UserError, match="no file has such a name"):
    read_prompts(path)
