# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import bz2
import functools
import gzip
import json
import lzma
import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palm_mtf.data.sources.find_files import find_files
from palm_mtf.data.sources.read_files import (
  MACROS,
  Fields,
  read_file,
  read_jsonl_texts,
)
from palm_mtf.errors import UserError
from tests.data.processes import peak_memory
from tests.data.small_sources import repeatable

COMPRESS = {
  "": bytes,
  ".gz": gzip.compress,
  ".bz2": bz2.compress,
  ".xz": functools.partial(lzma.compress, preset=0),
}
# tmp_path is one folder for all examples; each writes its file anew.
on_disk = repeatable(30)
each_compression = pytest.mark.parametrize("suffix", COMPRESS)


def write(folder, content: bytes, suffix: str = "", name: str = "a.jsonl"):
  path = folder / f"{name}{suffix}"
  path.write_bytes(COMPRESS[suffix](content))
  (file,) = find_files(str(path))
  return file


def lines_of(file, text="text", weight=None) -> list[tuple[int, str, float]]:
  lines = read_jsonl_texts(file, Fields(text, weight), MACROS)
  return [(line.number, line.text, line.weight) for line in lines]


def error(file, text="text", weight=None) -> str:
  with pytest.raises(UserError) as info:
    lines_of(file, text, weight)
  assert "\n" not in str(info.value)
  return str(info.value).removeprefix(f"TEXT_FILES: {file.path}")


@each_compression
@on_disk
@given(texts=st.lists(st.text(), min_size=1))
def test_any_text_is_read_from_json_lines(tmp_path, suffix, texts):
  for ascii in (True, False):
    content = "\n".join(
      json.dumps({"id": 1, "text": text}, ensure_ascii=ascii) for text in texts
    )
    file = write(tmp_path, content.encode(), suffix)
    assert lines_of(file) == [(i, t, 1.0) for i, t in enumerate(texts, 1)]


@each_compression
@given(content=st.binary())
@on_disk
def test_a_file_is_read_byte_for_byte(tmp_path, suffix, content):
  file = write(tmp_path, b"1" + content, suffix, "a.txt")
  assert read_file(file, MACROS) == b"1" + content


def test_blank_lines_count_but_hold_no_document(tmp_path):
  content = b'\n{"text": "one"}\r\n \t\r\n{"text": "two"}'
  assert lines_of(write(tmp_path, content)) == [(2, "one", 1), (4, "two", 1)]


def test_a_byte_order_mark_at_the_start_is_no_part_of_the_json(tmp_path):
  file = write(tmp_path, b'\xef\xbb\xbf{"text": "one"}')
  assert lines_of(file) == [(1, "one", 1.0)]


@pytest.mark.parametrize("weight", ["0", "1", "2.5", "1e3"])
def test_a_weight_is_a_number_of_at_least_zero(tmp_path, weight):
  file = write(tmp_path, b'{"text": "a", "w": ' + weight.encode() + b"}")
  assert lines_of(file, weight="w") == [(1, "a", float(weight))]


@pytest.mark.parametrize(
  "weight",
  ["-1", "true", '"2"', "null", "NaN", "Infinity", "1" + "0" * 400],
)
def test_a_weight_that_is_none_is_named(tmp_path, weight):
  file = write(tmp_path, b'{"text": "a", "w": ' + weight.encode() + b"}")
  shown = weight if len(weight) < 40 else f"{weight[:36]} ..."
  assert error(file, weight="w") == (
    f", line 1: 'w' is {shown}, not a number of at least 0; set WEIGHT_FIELD "
    "to the field that holds the weight, or to None, or mend the line."
  )


def qualities_of(file) -> list[float | None]:
  lines = read_jsonl_texts(file, Fields("text", quality="q"), MACROS)
  return [line.quality for line in lines]


@pytest.mark.parametrize("quality", ["0", "-1.5", "1e3", "1" + "0" * 400])
def test_a_quality_is_any_number(tmp_path, quality):
  file = write(tmp_path, b'{"text": "a", "q": ' + quality.encode() + b"}")
  assert qualities_of(file) == [json.loads(quality)]


@pytest.mark.parametrize(
  ("field", "message"),
  [
    (b'"q": "0.5"', "'q' is \"0.5\", not a number; set QUALITY_FIELD to the "),
    (b'"q": true', "'q' is true, not a number; set QUALITY_FIELD to the field"),
    (b'"q": NaN', "'q' is NaN, not a number; set QUALITY_FIELD to the field "),
    (b'"p": 1', "no field 'q'; it has 'text', 'p'; set QUALITY_FIELD, or mend"),
  ],
)
def test_a_line_without_a_quality_is_named(tmp_path, field, message):
  file = write(
    tmp_path, b'{"text": "a", "q": 1}\n{"text": "b", ' + field + b"}"
  )
  with pytest.raises(UserError) as info:
    qualities_of(file)
  where = f"TEXT_FILES: {file.path}, line 2: "
  assert str(info.value).startswith(where + message)


OBJECT = "a .jsonl file has one JSON object on each line."


@pytest.mark.parametrize(
  ("line", "message"),
  [
    (
      b'{"text": "caf\xe9"}',
      "not UTF-8, byte 0xe9 at column 14; convert the file to UTF-8, or mend "
      "the line.",
    ),
    (b'{"text":', f"not JSON: Expecting value at column 9; {OBJECT}"),
    (b"[1]", f"[1] is no JSON object; {OBJECT}"),
    (
      b'"' + b"x" * 99 + b'"',
      f'"{"x" * 35} ... is no JSON object; {OBJECT}',
    ),
    (
      b'{"txet": "a", "id": 1}',
      "no field 'text' (did you mean \"txet\"?); it has 'txet', 'id'; set "
      "TEXT_FIELD, or mend the line.",
    ),
    (
      b"{}",
      "no field 'text'; it is empty; set TEXT_FIELD, or mend the line.",
    ),
    (
      b'{"text": {"a": 1}}',
      "'text' is {\"a\": 1}, not a text; set TEXT_FIELD to the field that "
      "holds the text, or mend the line.",
    ),
  ],
)
@each_compression
def test_a_bad_line_is_named_with_its_number(tmp_path, suffix, line, message):
  file = write(tmp_path, b'{"text": "one"}\n\n' + line + b"\n", suffix)
  assert error(file) == f", line 3: {message}"


@pytest.mark.parametrize("line", [b"[" * 100_000, b"1" * 10_000])
def test_json_that_python_cannot_read_is_named(tmp_path, line):
  file = write(tmp_path, line)
  assert error(file).startswith(", line 1: not readable JSON: ")


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_file_that_is_cut_short_is_named_with_the_last_line(tmp_path, suffix):
  lines = [json.dumps({"text": os.urandom(50).hex()}) for _ in range(20_000)]
  file = write(tmp_path, "\n".join(lines).encode(), suffix)
  os.truncate(file.path, file.num_bytes // 2)
  read = []
  with pytest.raises(UserError) as info:
    for number, text, _, _ in read_jsonl_texts(
      file, Fields("text", None), MACROS
    ):
      assert json.loads(lines[number - 1])["text"] == text
      read.append(number)
  assert read
  assert f": damaged or cut short after line {len(read):,}: " in str(info.value)
  assert str(info.value).endswith(
    f"; copy or compress the {suffix} file again."
  )


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_a_file_that_is_not_compressed_as_named_is_damaged(tmp_path, suffix):
  file = write(tmp_path, b"text", name=f"a.txt{suffix}")
  with pytest.raises(UserError, match=f"damaged .* the {suffix} file again"):
    read_file(file, MACROS)


def test_a_damaged_checksum_is_found(tmp_path):
  content = bytearray(gzip.compress(b"text" * 1000))
  content[-8:-4] = b"\0\0\0\0"
  file = write(tmp_path, content, name="a.txt.gz")
  with pytest.raises(UserError, match="damaged or cut short: CRC check"):
    read_file(file, MACROS)


@each_compression
def test_a_file_that_vanishes_is_named(tmp_path, suffix):
  file = write(tmp_path, b"text", suffix)
  os.unlink(file.path)
  assert error(file) == ": No such file or directory; give a text file."
  with pytest.raises(UserError, match=f"{suffix}: No such file or directory"):
    read_file(file, MACROS)


@each_compression
def test_one_line_is_in_memory_at_a_time(tmp_path, suffix):
  line = json.dumps({"text": "x" * 100_000}).encode()
  file = write(tmp_path, b"\n".join([line] * 200), suffix)

  def read():
    lines = read_jsonl_texts(file, Fields("text", None), MACROS)
    assert sum(len(text) for _, text, _, _ in lines) == 20_000_000

  assert peak_memory(read) < 4_000_000
