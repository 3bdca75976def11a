# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
import json

import pytest

pytest.importorskip("seqio", reason="SeqIO is not installed")

from palm_mtf.errors import UserError
from palm_mtf.evaluation.exemplars import read_exemplars

TEXT = "Q: 1 + 1?\nA: 1 + 1 = 2.\n\tThe answer is 2.\r\n\nQ: 2?\nA: 2.\n\n"


def write_lines(folder, *lines):
  path = folder / "exemplars.jsonl"
  path.write_text("".join(json.dumps(line) + "\n" for line in lines))
  return str(path)


def one(inputs, targets, **more):
  return {"inputs": inputs, "targets": targets, **more}


def test_a_text_is_used_to_the_letter(tmp_path, caplog):
  path = tmp_path / "cot.txt"
  path.write_bytes(TEXT.encode())
  exemplars = read_exemplars(str(path), 8)
  assert exemplars.text == TEXT
  assert exemplars.choose("any", "law") == []
  assert not caplog.records


def test_a_text_that_runs_into_the_question_warns(tmp_path, caplog):
  for number, text in enumerate(("Q: 1?\nA: 1.\n\nQ: 2?\nA: 2.\n", "Answer")):
    path = tmp_path / f"{number}.txt"
    path.write_text(text)
    assert read_exemplars(str(path), None).text == text
    assert "the question follows its last character" in caplog.text
    caplog.clear()


def test_lines_stand_in_file_order_for_every_question(tmp_path):
  lines = [one(f"Q: {n}?\nA:", f" {n}\u2028{n}") for n in (3, 1, 2)]
  path = write_lines(tmp_path, *lines)
  texts = [x["inputs"] + x["targets"] for x in lines]
  for key in ("a", "b"):
    assert read_exemplars(path, None).choose(key, "") == texts
    assert read_exemplars(path, 2).choose(key, "") == texts[:2]
    assert read_exemplars(path, 0).choose(key, "") == []


def test_a_group_has_its_own_lines_and_those_of_no_group(tmp_path):
  path = write_lines(
    tmp_path,
    one("a", " 1", group="law"),
    one("b", " 2"),
    one("c", " 3", group="art"),
    one("d", " 4", group="law"),
  )
  exemplars = read_exemplars(path, 2)
  assert exemplars.choose("", "law") == ["a 1", "b 2"]
  assert exemplars.choose("", "art") == ["b 2", "c 3"]
  with pytest.raises(UserError) as info:
    exemplars.choose("", "chess")
  assert str(info.value) == (
    f"EXEMPLAR_FILES: NUM_SHOTS = 2, but {path} has only 1 exemplars of group "
    "'chess'; give a smaller number."
  )
  path = write_lines(tmp_path, one("a", " 1", group="law"))
  with pytest.raises(UserError, match="has no exemplar of group 'art'; write"):
    read_exemplars(path, None).choose("", "art")


def test_where_no_white_space_is_a_line_break_parts_inputs_and_targets(
  tmp_path,
):
  path = write_lines(tmp_path, one("a", "x"))
  assert read_exemplars(path, None).choose("", "") == ["a\nx"]


@pytest.mark.parametrize(
  ("content", "message"),
  [
    (b"", "is empty; write the exemplars."),
    (b"\n \n", "is empty; write the exemplars."),
    (b"\xff", "line 1: not UTF-8, byte 0xff at column 1; convert the file"),
    (b'{"inputs": "a"', ", line 1: not JSON: Expecting ',' delimiter at colu"),
    (b'["a", "b"]\n', ', line 1: ["a", "b"] is no JSON object; give {'),
    (b'{"inputs": "a"}\n', ", line 1 has the fields ['inputs']; give"),
    (
      b'{"inputs": "a", "targets": " b"}\n'
      b'{"inputs": "a", "targets": " b", "subject": "law"}\n',
      ", line 2 has the fields ['inputs', 'subject', 'targets']; give",
    ),
    (
      b'{"inputs": "a", "targets": 3}\n',
      ", line 1: 'targets' is 3, not a text; give {",
    ),
    (
      b'{"inputs": "a", "targets": ""}\n',
      ", line 1: 'targets' is empty; give {",
    ),
  ],
)
def test_a_wrong_file_is_one_line(tmp_path, content, message):
  path = tmp_path / "exemplars.jsonl"
  path.write_bytes(content)
  with pytest.raises(UserError) as info:
    read_exemplars(str(path), None)
  assert str(info.value).startswith(f"EXEMPLAR_FILES = {str(path)!r}")
  assert message in str(info.value)
  assert "\n" not in str(info.value)


def test_a_file_that_is_not_there_is_one_line(tmp_path):
  with pytest.raises(UserError, match="No such file or directory; give a text"):
    read_exemplars(str(tmp_path / "none.txt"), None)
