# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""A field that is missing or of another kind is never part of a question."""

import copy
import json

import pytest

from palm_mtf.tasks import code, fewshot
from palm_mtf.tasks.fields import check_fields
from tests.refusals import message_of
from tests.tasks.evaluation_records import EXPECTED

PROGRAMS = {
  code.humaneval: {
    "prompt": "def f():\n",
    "canonical_solution": "  return 1\n",
    "test": "def check(f): ...",
    "entry_point": "f",
  },
  code.mbpp: {"text": "Write f.", "code": "f = 1", "test_list": ["f"]},
}
PROMPTS = {
  **{
    name: (fewshot.TASKS[name].prompt, EXPECTED[name][1]) for name in EXPECTED
  },
  **{prompt.__name__: (prompt, x) for prompt, x in PROGRAMS.items()},
}
# Fields whose values are used unchecked, or only in some forms of the record.
FREE = {("winogrande", "label"), ("arc_easy", "answerKey")}
FREE |= {("arc_challenge", "answerKey")}


def refusal(prompt, record) -> str:
  return message_of(lambda: list(prompt(record)))


@pytest.mark.parametrize("name", PROMPTS)
def test_a_prompt_refuses_what_a_field_of_its_record_cannot_be(name):
  prompt, record = PROMPTS[name]
  assert list(prompt(record))
  for field in record:
    if (name, field) in FREE:
      continue
    without = {k: v for k, v in record.items() if k != field}
    if field not in ("answer", "answers") or name not in fewshot.TASKS:
      assert f"no field '{field}'" in refusal(prompt, without)
    for value in (None, [None], {"a": 1}, 1.5):
      message = refusal(prompt, {**record, field: value})
      assert message.startswith((f"field '{field}", f"no field '{field}."))
      assert message.endswith("; mend the record.")


KINDS = {"a": [str], "b": {"c": int, "d": [[str]]}, "e": object}
RECORD = {"a": ["x"], "b": {"c": 1, "d": [["x"], []]}, "e": None, "f": 0}


def test_fields_of_their_kinds_pass():
  check_fields(RECORD, KINDS)
  check_fields({"label": True}, {"label": int})


@pytest.mark.parametrize(
  ("path", "value", "message"),
  [
    (["a"], "x", "field 'a' is \"x\", not a list; "),
    (["a", 0], 5, "field 'a[0]' is 5, not a text; "),
    (["a", 0], "\0", "field 'a[0]' has a NUL, which a text cannot have; "),
    (["b"], [], "field 'b' is [], not a JSON object; "),
    (["b"], {"c": 1, "dd": []}, "no field 'b.d' (did you mean \"dd\"?); "),
    (["b", "c"], "1", "field 'b.c' is \"1\", not a whole number; "),
    (["b", "c"], float("nan"), "field 'b.c' is NaN, not a whole number; "),
    (["b", "d", 1], ["\ud83d"], "field 'b.d[1][0]' has half of a surrogate p"),
  ],
)
def test_a_field_of_another_kind_is_named_with_its_value(path, value, message):
  record = copy.deepcopy(RECORD)
  place = record
  for name in path[:-1]:
    place = place[name]
  place[path[-1]] = value
  assert message_of(
    check_fields, json.loads(json.dumps(record)), KINDS
  ).startswith(message)
