# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Texts to score are read from files; an error names the line."""

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.inference.score_inputs import (
  make_text_items,
  read_items,
)


def read(folder, name, content):
  path = folder / name
  path.write_bytes(content)
  return [
    (item.origin.removeprefix(str(path)), item.inputs, item.targets, item.kind)
    for item in read_items(str(path))
  ]


def test_a_file_is_a_document_byte_for_byte(tmp_path):
  assert read(tmp_path, "a.txt", b" one\r\n\ntwo\t\n") == [
    ("", "", (" one\r\n\ntwo\t\n",), "text")
  ]


def test_columns_are_inputs_and_targets_or_options(tmp_path):
  content = b"1 + 1 =\t 2\r\n2 + 2 =\t 4\t 5\n"
  assert read(tmp_path, "a.tsv", content) == [
    (":1", "1 + 1 =", (" 2",), "targets"),
    (":2", "2 + 2 =", (" 4", " 5"), "options"),
  ]


def test_json_lines_say_what_they_are_by_their_fields(tmp_path):
  content = (
    b'{"text": "a\\nb", "id": 7}\n'
    b'{"inputs": "a", "targets": "b\\t"}\n'
    b'{"inputs": "a", "options": ["b", "c"], "answer": 1}\n'
    b'{"inputs": "a", "options": ["b"]}'
  )
  assert read(tmp_path, "a.jsonl", content) == [
    (":1", "", ("a\nb",), "text"),
    (":2", "a", ("b\t",), "targets"),
    (":3", "a", ("b", "c"), "options"),
    (":4", "a", ("b",), "options"),
  ]


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"", ": is empty; there has to be a text to score."),
    ("a.txt", b"\xff", ", line 1: not UTF-8, byte 0xff at column 1; convert"),
    ("a.txt", None, ": No such file or directory; give a text file."),
    ("a.tsv", b"\n", ": is empty; there has to be a text to score."),
    ("a.tsv", b"a\tb\nc\n", ", line 2 has no tab; write inputs, a tab"),
    ("a.tsv", b"\tb\n", ", line 1: inputs are empty; give some"),
    ("a.tsv", b"a\t\n", ", line 1: targets are empty; there has to be"),
    ("a.jsonl", b" \n", ": is empty; there has to be a text to score."),
    ("a.jsonl", b"a\n", ", line 1: not JSON: Expecting value at column 1; g"),
    ("a.jsonl", b'["a"]\n', ', line 1: ["a"] is no JSON object; give {'),
    ("a.jsonl", b'{"text": ""}\n', ", line 1: 'text' is empty; give {"),
    ("a.jsonl", b'{"prompt": "a"}', ", line 1 has the fields ['prompt']; give"),
    ("a.jsonl", b'{"text": "a", "inputs": "b"}', ", line 1 has the fields"),
    (
      "a.jsonl",
      b'{"inputs": "a", "targets": 3}',
      ", line 1: 'targets' is 3, not a text; give {",
    ),
    (
      "a.jsonl",
      b'{"inputs": "a", "options": "bc"}',
      ", line 1: 'options' is not a list of texts; give {",
    ),
    (
      "a.jsonl",
      b'{"inputs": "a", "options": ["b", null]}',
      ", line 1: 'options' is null, not a text; give {",
    ),
    (
      "a.jsonl",
      b'{"inputs": "a", "options": []}',
      ", line 1: targets are empty",
    ),
    (
      "a.jsonl",
      b'{"inputs": "", "targets": "b"}',
      ", line 1: inputs are empty",
    ),
  ],
)
def test_an_item_that_cannot_be_scored_is_one_error_line(
  tmp_path, name, content, message
):
  path = tmp_path / name
  if content is not None:
    path.write_bytes(content)
  with pytest.raises(UserError) as info:
    read_items(str(path))
  assert str(info.value).startswith(f"--input = {str(path)!r}{message}")


def test_an_empty_text_is_one_error_line():
  with pytest.raises(UserError, match="--text = '': is empty"):
    make_text_items(["a", ""])
