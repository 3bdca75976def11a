# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Files of JSON lines, whole and cut short."""

import contextlib
import json

import pytest

from palm_mtf.errors import UserError
from palm_mtf.model_dir.json_lines import (
  JsonLinesWriter,
  read_json_lines,
  write_json_lines,
)
from tests.refusals import message_of

VALUES = [{"step": 1, "text": "a\u2028b\n"}, [1, 2.5], None]


def test_what_is_appended_is_on_the_disk_when_write_returns(tmp_path):
  path = str(tmp_path / "x.jsonl")
  for number, value in enumerate(VALUES, 1):
    with contextlib.closing(JsonLinesWriter(path)) as lines:
      lines.write(value)
      assert list(read_json_lines(path, object)) == VALUES[:number]


def test_a_file_is_written_whole(tmp_path):
  path = tmp_path / "new" / "x.jsonl"
  write_json_lines(str(path), VALUES)
  assert [json.loads(x) for x in path.read_text().splitlines()] == VALUES
  write_json_lines(str(path), VALUES[:1])
  assert list(read_json_lines(str(path))) == VALUES[:1]


@pytest.mark.parametrize("length", range(1, 8))
def test_half_a_last_line_is_not_read(tmp_path, length):
  path = tmp_path / "x.jsonl"
  path.write_text('{"a": 1}\n' + '{"b": 2}'[:length])
  assert list(read_json_lines(str(path))) == [{"a": 1}]


@pytest.mark.parametrize(
  "content",
  [
    b'{"a": 1}\n' + b"\0" * 9,
    b'{"a": 1}\n' + b"\0" * 9 + b"\n",
    b"\0" * 9 + b'{"a": 1}\n',
  ],
)
def test_zeros_that_a_loss_of_power_left_are_no_line(tmp_path, content):
  path = tmp_path / "x.jsonl"
  path.write_bytes(content)
  assert list(read_json_lines(str(path))) == [{"a": 1}]


def read(path, **named):
  return list(read_json_lines(str(path), **named))


@pytest.mark.parametrize(
  ("line", "named", "kind"),
  [
    *((line, {}, "") for line in (b'{"b": ', b"[2]")),
    *(
      (line, {"number": "step"}, ' with a "step"')
      for line in (b"7", b'{"a": 1}', b'{"step": "1"}', b"\xff")
    ),
  ],
)
def test_another_line_that_is_no_json_object_or_has_no_number_is_named(
  tmp_path, line, named, kind
):
  path = tmp_path / "x.jsonl"
  path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')
  assert message_of(read, path, **named) == (
    f"{path}, line 2: is no JSON object{kind}; remove the line."
  )


def test_no_file_has_no_lines(tmp_path):
  assert list(read_json_lines(str(tmp_path / "none.jsonl"))) == []


def test_a_full_disk_is_named():
  with (
    pytest.raises(UserError, match="no disk space left for /dev/full"),
    contextlib.closing(JsonLinesWriter("/dev/full")) as lines,
  ):
    lines.write(VALUES)
