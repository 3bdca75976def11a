# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.serving.completion_request import (
  as_message,
  make_completion_body,
)
from tests.refusals import message_of

MESSAGES = [{"role": "user", "content": "a"}]


class Lengths:
  """A template that makes the lengths of contents the tokens."""

  fields = frozenset({"name"})
  variables = frozenset({"messages"})

  def encode(self, messages, tools=None):
    assert not tools
    return [len(x["content"]) for x in messages]


def read(body):
  read, tools = make_completion_body(
    body, Lengths(), most_messages=9, most_characters=10
  )
  assert tools is None
  return read


def test_messages_become_the_tokens_of_the_prompt():
  answer = {"role": "assistant", "content": "bcd", "name": "x"}
  body = {"messages": [*MESSAGES, answer], "stream": True, "logprobs": False}
  assert read(body) == {"prompt": [1, 3], "stream": True}
  body = {"messages": MESSAGES, "max_completion_tokens": 7}
  assert read(body) == {"prompt": [1], "max_tokens": 7}


@pytest.mark.parametrize(
  "body, message",
  [
    ({}, "messages = None: give"),
    ({"messages": []}, r"messages = \[\]: give"),
    ({"messages": ["a"]}, "messages: 'a': give"),
    ({"messages": [{"role": "user"}]}, "messages: {'role': 'user'}: give"),
    ({"messages": [{"role": 1, "content": ""}]}, "messages: {.*'role': 1"),
    ({"messages": [{**MESSAGES[0], "content": "a" * 11}]}, "longer than S"),
    ({"messages": [{**MESSAGES[0], "name": "a" * 10}]}, "longer than S"),
    ({"messages": [{**MESSAGES[0], "name": [["a" * 10]]}]}, "longer than S"),
    ({"messages": [{**MESSAGES[0], "name": {"a" * 10: 1}}]}, "longer than S"),
    ({"messages": [{**MESSAGES[0], "content": ""}] * 10}, "longer than S"),
    ({"messages": [{**MESSAGES[0], "role": "a" * 65}]}, "role = .*at most 64"),
    ({"messages": [{**MESSAGES[0], "role": "a]"}]}, "role = 'a]': give"),
    ({"messages": [{**MESSAGES[0], "role": ""}]}, "role = '': give"),
    (
      {"messages": [{**MESSAGES[0], "tool_calls": [1]}]},
      "'tool_calls': the mo",
    ),
    (
      {"messages": [{"role": "user", "content": None}]},
      "'content': None, .*: give",
    ),
    ({"messages": [{"role": "user", "content": [1]}]}, "messages: 1: is not"),
    (
      {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
      "messages: {'type': 'text'}: is not supported as a part",
    ),
    ({"messages": MESSAGES, "prompt": "a"}, "^prompt: is not supported"),
    ({"messages": MESSAGES, "echo": True}, "^echo: is not supported"),
    ({"messages": MESSAGES, "logprobs": True}, "^logprobs: is not supported"),
  ],
)
def test_a_wrong_field_is_refused(body, message):
  with pytest.raises(UserError, match=message):
    read(body)


def test_a_body_that_is_no_object_is_left_to_the_reader_of_completions():
  assert read([1]) == [1]


def test_fields_without_a_value_change_nothing():
  answer = {"role": "assistant", "content": None, "tool_calls": [], "x": None}
  parts = [{"type": "text", "text": "ab"}]
  body = {"messages": [{"role": "user", "content": parts}, answer]}
  assert read(body) == {"prompt": [1, 0]}  # one part, and an empty text


def test_a_name_that_is_the_role_changes_nothing(monkeypatch):
  body = {"messages": [{**MESSAGES[0], "name": "user"}]}
  assert read(body) == {"prompt": [1]}
  monkeypatch.setattr(Lengths, "fields", frozenset())
  assert read(body) == {"prompt": [1]}
  body["messages"][0]["name"] = "Ann"
  assert "'name': the model's chat template" in message_of(read, body)


def test_an_answer_names_its_role_once():
  choice = {"index": 2, "text": "a", "logprobs": None, "finish_reason": None}
  others = {"index": 2, "logprobs": None, "finish_reason": None}
  assert as_message(choice, is_part=False, is_first=True) == {
    **others,
    "message": {"role": "assistant", "content": "a"},
  }
  assert as_message(choice, is_part=True, is_first=False) == {
    **others,
    "delta": {"content": "a"},
  }


class Letters(Lengths):
  """A template that makes letters the tokens."""

  def encode(self, messages, tools=None):
    return [letter for x in messages for letter in x["content"]]


class Filled:
  """Puts as many dots before a text as fit."""

  def put_before(self, text, fits):
    return next(x for i in range(20, -1, -1) if fits(x := "." * i + text))


@pytest.mark.parametrize(
  ("body", "prompt"),
  [
    ({}, "hi......a"),
    ({"max_tokens": 1}, "hi........a"),
    ({"max_completion_tokens": 6}, "hi...a"),
  ],
)
def test_passages_stand_before_the_last_message_of_a_user(body, prompt):
  given = Letters(), Filled()
  limits = {"default_tokens": 3, "most_messages": 12, "most_characters": 99}
  earlier = {"role": "assistant", "content": "hi"}
  body = {"messages": [earlier, *MESSAGES], **body}
  read, _ = make_completion_body(body, *given, **limits)
  assert "".join(read["prompt"]) == prompt
  read, _ = make_completion_body({"messages": [earlier]}, *given, **limits)
  assert "".join(read["prompt"]) == "hi"
