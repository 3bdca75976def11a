# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations in OpenAI's form, answered as completions of one prompt."""

import re
from collections.abc import Iterator, Mapping, Set

from palm_mtf.data.vocabulary.chat import ChatTemplate, Message
from palm_mtf.errors import UserError, shorten

_FORM = 'give [{"role": "user", "content": "..."}]'
_NO_VALUES: tuple[object, ...] = (None, "", [], {})
_ROLE = re.compile(r"\w{1,64}", re.ASCII)


def make_completion_body(
  body: object,
  template: ChatTemplate,
  *,
  most_messages: int,
  most_characters: float,
) -> object:
  """Returns the body of the completion that answers a conversation.

  Raises:
    UserError: if messages are missing or wrong, or are more than
      `most_messages`, or have more than `most_characters` characters; or if a
      field is not supported.
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
  messages = [_read_message(x, template.fields) for x in messages]
  size = sum(len(text) for each in messages for text in _texts(each))
  # Each message takes at least one token, so SEQUENCE_LENGTH limits both.
  if len(messages) > most_messages or size > most_characters:
    raise UserError("messages: are longer than SEQUENCE_LENGTH; shorten them.")
  fields |= {} if most is None else {"max_tokens": most}
  return {**fields, "prompt": template.encode(messages)}


def _texts(message: Mapping[str, object]) -> Iterator[str]:
  """Yields a message's texts that may become tokens, to measure its length."""
  found = [x for name, x in message.items() if name != "role"]
  while found:
    each = found.pop()
    if isinstance(each, str) and each not in ("type", "text"):
      yield each
    elif isinstance(each, Mapping):
      found += (x for field in each.items() for x in field)
    elif isinstance(each, list):
      found += each


def _read_message(given: object, fields: Set[str]) -> Message:
  message = given if isinstance(given, Mapping) else {}
  role, content = message.get("role"), message.get("content")
  if content is None and role == "assistant":
    content = ""
  if not isinstance(role, str) or not (isinstance(content, (str, list))):
    raise UserError(f"messages: {shorten(given)}: {_FORM}.")
  if not _ROLE.fullmatch(role):
    raise UserError(
      f"role = {shorten(role)}: give at most 64 letters, digits or _."
    )
  for part in content if isinstance(content, list) else ():
    found = part if isinstance(part, Mapping) else {}
    if found.get("type") != "text" or not isinstance(found.get("text"), str):
      raise UserError(
        f"messages: {shorten(part)}: is not supported as a part of a content; "
        'give {"type": "text", "text": "..."}.'
      )
  # Allow what changes nothing: empty fields, and a `name` equal to the role.
  others = {name: x for name, x in message.items() if x not in _NO_VALUES}
  read = {*fields, "role", "content"}
  if others.get("name") == role and "name" not in read:
    del others["name"]
  for name in others.keys() - read:
    raise UserError(
      f"messages: {shorten(name)}: the model's chat template does not read "
      "this field; leave it out."
    )
  return {**others, "role": role, "content": content}


def as_message(
  choice: Mapping[str, object], *, is_part: bool, is_first: bool
) -> dict[str, object]:
  """Converts an element of "choices" to the form of a chat completion.

  Args:
    choice: a completion's text and fields or, in a stream, a part of them.
    is_part: whether `choice` is such a part, which the API calls "delta".
    is_first: whether the text begins the answer; then the role is given, too.
  """
  role = {"role": "assistant"} if is_first else {}
  others = {name: x for name, x in choice.items() if name != "text"}
  message = {**role, "content": choice["text"]}
  return {**others, "delta" if is_part else "message": message}
