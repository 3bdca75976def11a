# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in OpenAI's form, answered as completions of one prompt."""

from collections.abc import Mapping

from palm_mtf.data.vocabulary.chat import ChatTemplate, Message
from palm_mtf.errors import UserError, shorten

_FORM = 'give [{"role": "user", "content": "..."}]'


def make_completion_body(
  body: object, template: ChatTemplate, most_characters: float
) -> object:
  """Returns the body of the completion that answers a conversation.

  Raises:
    UserError: if messages are missing, are not texts, or have more than
      `most_characters` characters; or if a field is not supported.
  """
  if not isinstance(body, Mapping):
    return body
  for name in ("prompt", "echo", "logprobs"):
    if body.get(name):
      raise UserError(f"{name}: is not supported here; leave it out.")
  fields = {name: x for name, x in body.items() if name != "logprobs"}
  messages, most = (
    fields.pop(name, None) for name in ("messages", "max_completion_tokens")
  )
  if not isinstance(messages, list) or not messages:
    raise UserError(f"messages = {shorten(messages)}: {_FORM}.")
  messages = [_read_message(x) for x in messages]
  if sum(len(x["content"]) for x in messages) > most_characters:
    raise UserError("messages: are longer than SEQUENCE_LENGTH; shorten them.")
  fields |= {} if most is None else {"max_tokens": most}
  return {**fields, "prompt": template.encode(messages)}


def _read_message(given: object) -> Message:
  fields = given if isinstance(given, Mapping) else {}
  found = {name: fields.get(name) for name in ("role", "content")}
  if not all(isinstance(x, str) for x in found.values()):
    raise UserError(f"messages: {shorten(given)}: {_FORM}.")
  return found


def as_message(
  choice: Mapping[str, object], *, is_part: bool, is_first: bool
) -> dict[str, object]:
  """Returns a choice of a completion as a choice of a conversation's answer.

  Args:
    choice: a completion, or a part of it.
    is_part: whether `choice` is a part.
    is_first: whether `choice` begins the answer; the first part has the role.
  """
  role = {"role": "assistant"} if is_first else {}
  others = {name: x for name, x in choice.items() if name != "text"}
  message = {**role, "content": choice["text"]}
  return {**others, "delta" if is_part else "message": message}
