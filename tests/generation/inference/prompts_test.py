# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Prompts are read from files; an error names the line."""

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.inference.prompts import add_start, read_prompts


@pytest.mark.parametrize(
  ("name", "content", "message"),
  [
    ("a.txt", b"one\n\ntwo\n", ", line 2 is empty; there has to be a text"),
    ("a.txt", b"", ": is empty; write one prompt per line."),
    ("a.txt", b"\n\n", ": is empty; write one prompt per line."),
    ("a.jsonl", b"\n", ": is empty; write one prompt per line."),
    ("a.jsonl", b'{"prompt": ""}\n', ", line 1: 'prompt' is empty; there has"),
    (
      "a.jsonl",
      b'{"promt": "a"}\n',
      ", line 1: no field 'prompt' (did you mean \"promt\"?); write "
      '{"prompt": "..."}.',
    ),
  ],
)
def test_an_invalid_prompt_is_one_error_line(tmp_path, name, content, message):
  path = tmp_path / name
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
