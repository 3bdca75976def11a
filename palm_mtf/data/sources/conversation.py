# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations: documents of messages, of which only answers are learned.

A conversation is a list of messages in OpenAI's form, {"role": "user",
"content": "..."}. Messages with the role "assistant" are answers.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.errors import UserError
from palm_mtf.user_text import short_json

MESSAGES = "messages"  # field of a JSON line, and feature of a SeqIO task
ANSWER = "assistant"
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
_FORM = 'give [{"role": "user", "content": "..."}, ...]'


class Conversation(NamedTuple):
  """Messages up to the last answer, and where they come from."""

  messages: Sequence[Mapping[str, Any]]
  where: str  # beginning of error messages, such as "TEXT_FILES: FILE, line 2"

  @property
  def texts(self) -> list[str]:
    """The content of each message."""
    return [_text_of(each) or "" for each in self.messages]

  @property
  def answers(self) -> list[int]:
    """The indices of the answers in `messages`."""
    roles = enumerate(each["role"] for each in self.messages)
    return [i for i, role in roles if role == ANSWER]


def read_conversation(given: object, where: str) -> Conversation:
  """Checks the messages of a JSON line or example; drops those after an answer.

  Raises UserError if they are not messages, a role is unknown, an answer is
  empty or has no question before it, or there is no answer.
  """
  if not isinstance(given, list) or not given:
    raise UserError(
      f"{where}: {MESSAGES!r} is {short_json(given)}, not a list of messages; "
      f"{_FORM}."
    )
  is_asked, num_kept = False, 0
  for number, message in enumerate(given):
    what = f"{where}: messages[{number}]"
    text = _text_of(message)
    if text is None:
      raise UserError(f"{what} is {short_json(message)}; {_FORM}.")
    role = message.get("role")
    if role not in ROLES:
      raise UserError(
        f"{what} has the role {short_json(role)}; give one of "
        f"{', '.join(ROLES)}."
      )
    if role == ANSWER:
      if not text.strip() and not message.get("tool_calls"):
        raise UserError(
          f"{what} is an empty answer; give it a content, or leave out the "
          "conversation."
        )
      if not is_asked:
        raise UserError(
          f"{what} is an answer without a question; put a message of a user "
          "before it."
        )
      num_kept = number + 1
    is_asked |= role not in (ANSWER, "developer", "system")
  if not num_kept:
    raise UserError(
      f"{where}: the conversation has no answer; add a message with the role "
      f"{ANSWER!r}, or leave it out."
    )
  return Conversation(given[:num_kept], where)


def _text_of(message: object) -> str | None:
  """Returns the text of a message's content; None if it has another form."""
  if not isinstance(message, Mapping):
    return None
  content = message.get("content")
  if content is None and message.get("role") == ANSWER:
    return ""
  if isinstance(content, str):
    return content
  if not isinstance(content, list):
    return None
  texts = [x.get("text") if isinstance(x, Mapping) else None for x in content]
  return "\n".join(texts) if all(isinstance(x, str) for x in texts) else None
