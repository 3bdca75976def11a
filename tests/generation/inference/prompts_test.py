# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts are read from files; an error names the line."""

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.inference.prompts import add_start, read_prompts


def test_each_line_is_a_prompt_and_of_json_its_field(tmp_path):
  text = tmp_path / "a.txt"
  text.write_text("one two\n three\n")
  assert read_prompts(str(text)) == ["one two", " three"]
  lines = tmp_path / "a.jsonl"
  lines.write_text('{"prompt": "one\\ntwo", "id": 3}\n{"prompt": "x"}\n')
  assert read_prompts(str(lines)) == ["one\ntwo", "x"]


# Characters at which splitlines() splits, but which an editor shows in a line.
@pytest.mark.parametrize("mark", "\x0b\x0c\x1c\x1d\x1e\x85\u2028\u2029")
def test_a_prompt_ends_only_at_a_line_feed(tmp_path, mark):
  prompts = [f"one two{mark}three", "four\rfive"]
  text = tmp_path / "a.txt"
  text.write_bytes("\r\n".join([*prompts, ""]).encode())
  assert read_prompts(str(text)) == prompts
  if mark > " ":  # JSON allows it unescaped
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(f'{{"prompt": "one{mark}two"}}\n'.encode())
    assert read_prompts(str(lines)) == [f"one{mark}two"]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"one\n\ntwo\n", ", line 2 is empty; there has to be a text"),
    ("a.txt", b"", ": is empty; write one prompt per line."),
    ("a.txt", b"\n\n", ": is empty; write one prompt per line."),
    ("a.txt", b"\xff", ", line 1: not UTF-8, byte 0xff at column 1; convert"),
    ("a.jsonl", b"\n", ": is empty; write one prompt per line."),
    ("a.jsonl", b'{"prompt": ""}\n', ", line 1: 'prompt' is empty; there has"),
    ("a.jsonl", b'{"prompt": "a"}\nb\n', ", line 2: not JSON: Expecting value"),
    (
      "a.jsonl",
      b'{"promt": "a"}\n',
      ", line 1: no field 'prompt' (did you mean \"promt\"?); write "
      '{"prompt": "..."}.',
    ),
    ("a.jsonl", b'["a"]\n', ', line 1: ["a"] is no JSON object; write {'),
    ("a.txt", None, ": No such file or directory; give a text file."),
  ],
)
def test_an_invalid_prompt_is_one_error_line(tmp_path, name, content, message):
  path = tmp_path / name
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError) as info:
    read_prompts(str(path))
  assert str(info.value).startswith(f"--input = {str(path)!r}{message}")


@pytest.mark.parametrize(
  ("ids", "expected"),
  [
    ([5, 6], [1, 5, 6]),
    ([1, 5, 6], [1, 5, 6]),  # from a tokenizer that adds the start token
    ([1], [1]),
    ([], [1]),
    ([5, 1, 6], [1, 5, 1, 6]),
    ([1, 1, 5], [1, 1, 5]),  # [eod] after the start token
    ([0, 5], [1, 0, 5]),  # begins no document under PACKING = "joined"
  ],
)
def test_ids_begin_with_the_start_token_once(ids, expected):
  assert add_start(ids, 1, eod_id=1) == expected


def test_without_a_start_token_ids_stay_as_they_are():
  assert add_start([0, 5], None, eod_id=1) == [0, 5]
  assert add_start([], None, eod_id=1) == [1]
