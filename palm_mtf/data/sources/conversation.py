# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Conversations: documents of messages, of which only answers are learned.

A conversation is a list of messages in OpenAI's form, {"role": "user",
"content": "..."}. Messages with the role "assistant" are answers.

A conversation may have tools, which its answers call: {"type": "function",
"function": {"name": ..., "parameters": ...}}.

A pair is a conversation with two last answers, of which one is chosen and the
other is rejected. A plain pair is of texts, which need no chat template.
"""

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from palm_mtf.errors import UserError
from palm_mtf.user_text import short_json

# Forms of documents.
TEXTS, PAIRS, PLAIN_PAIRS = "texts", "pairs", "plain pairs"
MESSAGES = "messages"  # also field of a JSON line, and feature of a SeqIO task
ANSWERS = ("chosen", "rejected")  # the same for the answers of a pair
PROMPTS = ("prompt", MESSAGES)  # the same for what they answer
TOOLS = "tools"  # the same for the tools of a conversation
ANSWER = "assistant"
ROLES = ("assistant", "developer", "function", "system", "tool", "user")
_FORM = 'give [{"role": "user", "content": "..."}, ...]'
_MOST_LEVELS = 100  # of lists and objects; Python can write about 400 as JSON


class Conversation(NamedTuple):
  """Messages up to the last answer, and where they come from."""

  messages: Sequence[Mapping[str, Any]]
  where: str  # beginning of error messages, such as "TEXT_FILES: FILE, line 2"
  form: str = MESSAGES  # or PAIRS, or PLAIN_PAIRS
  # The rejected answer of a pair, whose chosen answer is the last message.
  rejected: Mapping[str, Any] | None = None
  tools: Any = None  # as given, or None; the vocabulary's template checks them

  @property
  def texts(self) -> list[str]:
    """The content of each message, then that of the rejected answer, if any."""
    others = [self.rejected] if self.rejected else []
    return [_text_of(each) or "" for each in (*self.messages, *others)]

  @property
  def answers(self) -> list[int]:
    """The indices in `messages` of the answers that are learned."""
    if self.rejected:
      return [len(self.messages) - 1]
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


def read_fields(given: Mapping[str, object], where: str) -> Conversation:
  """Returns the conversation, or the pair, in the fields of a JSON line.

  The answers of a pair, "chosen" and "rejected", are texts or lists of
  messages. What they answer is the field "prompt" or "messages", or else the
  messages before the last one of both lists. The field "tools" is optional.

  Raises UserError if an answer is missing or repeats the prompt, the prompt
  ends with an answer, or the answers are equal or answer different messages; a
  field is nested too deeply; or as `read_conversation`.
  """
  _check_levels([given.get(x) for x in (*PROMPTS, *ANSWERS, TOOLS)], where)
  tools = given.get(TOOLS) or None
  if {*ANSWERS}.isdisjoint(given):
    return read_conversation(given[MESSAGES], where)._replace(tools=tools)
  prompts = [given[x] for x in PROMPTS if given.get(x)]
  if len(prompts) > 1:
    raise UserError(f"{where}: has 'prompt' and 'messages'; leave one out.")
  prompt = prompts[0] if prompts else []
  both = [given.get(x) for x in ANSWERS]
  for name, answer in zip(ANSWERS, both, strict=True):
    if not answer:
      raise UserError(
        f"{where}: has no {name!r}; a pair has a chosen and a rejected answer."
      )
  if not prompt and isinstance(both[0], str):
    raise UserError(f"{where}: has no 'prompt', which both texts answer.")
  is_plain = isinstance(prompt, str)
  if is_plain and tools:
    raise UserError(
      f"{where}: has 'tools', which only a chat template writes; leave them "
      "out, or give prompt and answers as lists of messages."
    )
  asked = [{"role": "user", "content": prompt}] if is_plain else prompt
  found = []
  for name, answer in zip(ANSWERS, both, strict=True):
    if isinstance(answer, str):
      answer = [{"role": ANSWER, "content": answer}]
    elif is_plain or not isinstance(answer, list):
      raise UserError(
        f"{where}: {name!r} is {short_json(answer)}; give prompt and answers "
        "as texts, or as lists of messages."
      )
    elif asked and isinstance(asked, list) and answer[: len(asked)] == asked:
      raise UserError(
        f"{where}: {name!r} repeats the messages of the prompt; leave them out."
      )
    turns = [*asked, *answer] if isinstance(asked, list) else asked
    read = read_conversation(turns, f"{where}: {name}").messages
    if len(read) != len(turns):
      raise UserError(
        f"{where}: {name!r} does not end with an answer (role {ANSWER!r})."
      )
    found.append(read)
  (*before, chosen), (*same, rejected) = found
  if before != same:
    raise UserError(
      f"{where}: 'chosen' and 'rejected' answer different messages; give both "
      "the same messages before the last one."
    )
  if before[-1]["role"] == ANSWER:
    raise UserError(
      f"{where}: the messages before 'chosen' and 'rejected' end with an "
      "answer; leave it out."
    )
  if chosen == rejected:
    raise UserError(
      f"{where}: 'chosen' and 'rejected' are equal; leave the pair out."
    )
  form = PLAIN_PAIRS if is_plain else PAIRS
  return Conversation(found[0], where, form, rejected, tools)


def parse_fields(texts: Mapping[str, str], where: str) -> Conversation:
  """Returns the same of an example, in which lists of messages are JSON."""
  given: dict[str, object] = {}
  for name, text in texts.items():
    try:
      found = json.loads(text)
    except (ValueError, RecursionError):
      found = None
    is_list = isinstance(found, list)
    is_list = is_list and all(isinstance(x, dict) for x in found)
    given[name] = found if is_list else text
  return read_fields(given, where)


def _check_levels(values: Iterable[object], where: str) -> None:
  """Raises UserError if a value is nested deeper than _MOST_LEVELS."""
  for _ in range(_MOST_LEVELS):
    parts = [
      x.values() if isinstance(x, dict) else x
      for x in values
      if isinstance(x, (dict, list))
    ]
    if not parts:
      return
    values = itertools.chain.from_iterable(parts)
  raise UserError(
    f"{where}: has more than {_MOST_LEVELS} lists and objects inside each "
    "other; simplify it, or leave it out."
  )


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
