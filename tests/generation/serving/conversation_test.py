# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0

import pytest

from palm_mtf.errors import UserError
from palm_mtf.generation.serving.conversation import (
  as_message,
  make_completion_body,
)

MESSAGES = [{"role": "user", "content": "a"}]


class Lengths:
  """A template that makes the lengths of contents the tokens."""

  words = frozenset({"name"})

  def encode(self, messages):
    return [len(x["content"]) for x in messages]


def read(body):
  return make_completion_body(
    body, Lengths(), most_messages=9, most_characters=10
  )


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
    ({"messages": MESSAGES * 11}, "longer than SEQUENCE_LENGTH"),
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
