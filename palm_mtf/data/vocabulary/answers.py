# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Encodes conversations for training, and finds the tokens of their answers.

Templates need no marks of answers. Each answer is found by two renderings:

  prompt   the messages before the answer, and the start of an answer, which is
           what the model reads when it is asked for this answer
  longer   the messages up to and with the answer

The tokens of `longer` after those of `prompt` are the answer. It ends with the
first token that ends a generated text, or else with the [eod] of the document.
What a template writes after that token, such as a line end, is no answer.

A pair is encoded as the conversation with its chosen answer, and after that the
conversation with its rejected answer. Both count only the last answer.

Plain pairs need no template: prompt and answer are encoded as one text, then
[eod]. If a token of this text would hold the end of the prompt and the start of
the answer, the answer is encoded by itself, as a text that continues another.
Then the prompt has the tokens that `generate` reads.
"""

from collections.abc import Collection, Mapping

import numpy as np

from palm_mtf.data.sources.conversation import PLAIN_PAIRS, Conversation
from palm_mtf.data.sources.document import hash_parts
from palm_mtf.data.vocabulary.chat import (
  FILE_NAME,
  ChatTemplate,
  read_message,
  read_tools,
)
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, did_you_mean, shorten
from palm_mtf.json_text import STRICT_DECODER

# No client waits for a rendering, so a busy machine may take long for it.
_MOST_SECS = 60.0
# The rule for plain pairs, which the hash of their stored tokens has.
_ONE_TEXT = "one text"


class ConversationEncoder:
  """Encodes conversations by a vocabulary's chat template."""

  def __init__(
    self,
    vocabulary: Vocabulary,
    start_id: int | None,
    *,
    is_plain: bool = False,
  ):
    """Opens the template; arguments and errors are those of ChatTemplate.

    `is_plain`: whether all conversations are plain pairs, without a template.
    """
    self._template = (
      None if is_plain else ChatTemplate(vocabulary, start_id, _MOST_SECS)
    )
    self._vocabulary, self._start_id = vocabulary, start_id
    self._end_ids, self._eod_id = {*vocabulary.end_ids}, vocabulary.eod_id

  @property
  def writes_date(self) -> bool:
    """Whether the template may write the date."""
    return bool(self._template) and "strftime_now" in self._template.text

  def fingerprint(self, form: str) -> str:
    """Returns a hash of what decides the tokens of a form, besides the ids."""
    if form == PLAIN_PAIRS:
      return hash_parts((_ONE_TEXT, self._start_id))
    return self._template.fingerprint

  def prompt(self, conversation: Conversation, answer: int) -> list[int]:
    """Returns what the model reads before message `answer`, in a chat."""
    if conversation.form == PLAIN_PAIRS:
      return self._encode_texts(conversation)[0]
    messages = self._read(conversation)[:answer]
    return self._encode(messages, conversation, answer, asks=True)

  def encode(self, conversation: Conversation) -> tuple[np.ndarray, np.ndarray]:
    """Returns a conversation's tokens, and where its answers are.

    The tokens, [num_tokens], int32, begin with the first that a model reads,
    and lack the [eod] of the document. For each answer, [num_answers, 2], int64
    has the indices of its first token and after its last. An answer that [eod]
    ends, which only the last may, ends at num_tokens + 1.

    Of a pair, the tokens are those of both conversations, and the answers are
    the chosen and the rejected one, with which the conversations end.

    Raises UserError, with the conversation's place, if the template refuses the
    messages, renders them in a way that has no such indices, or both answers of
    a pair have the same tokens.
    """
    if not conversation.rejected:
      return self._encode_answers(conversation)
    messages = [*conversation.messages[:-1], conversation.rejected]
    chosen, (first,) = self._encode_answers(conversation)
    other = conversation._replace(messages=messages)
    rejected, (last,) = self._encode_answers(other)
    if np.array_equal(chosen, rejected):
      raise UserError(
        f"{conversation.where}: 'chosen' and 'rejected' have the same tokens; "
        "leave the pair out."
      )
    chosen = np.append(chosen, np.int32(self._eod_id))[: first[1]]
    return (
      np.concatenate([chosen, rejected]),
      np.stack([first, last + len(chosen)]),
    )

  def _encode_answers(
    self, conversation: Conversation
  ) -> tuple[np.ndarray, np.ndarray]:
    if conversation.form == PLAIN_PAIRS:
      prompt, tokens = self._encode_texts(conversation)
      span = len(prompt), len(tokens) + 1
      return np.array(tokens, np.int32), np.array([span], np.int64)
    messages = self._read(conversation)
    tokens: list[int] = []
    spans: list[tuple[int, int]] = []
    for i in conversation.answers:
      what = f"{conversation.where}: messages[{i}]: {FILE_NAME}"
      if spans and spans[-1][1] > len(tokens):
        raise UserError(
          f"{what} writes no token that ends a text after the answer before; "
          "let it end answers with {{ eos_token }}, or list its token in "
          "generation_config.json."
        )
      prompt = self._encode(messages[:i], conversation, i, asks=True)
      longer = self._encode(messages[: i + 1], conversation, i, asks=False)
      begin = len(prompt)
      if longer[: len(tokens)] != tokens or begin < len(tokens):
        raise UserError(
          f"{what} renders an earlier answer differently with later turns; "
          "train on conversations that end there, or correct it."
        )
      if longer[:begin] != prompt or len(longer) == begin:
        raise UserError(
          f"{what} renders the answer so that its tokens do not follow those "
          "of the prompt; change the start of the answer, or let the template "
          "end prompts with a control token or a line end."
        )
      places = range(begin, len(longer))
      ends = (place for place in places if longer[place] in self._end_ids)
      end = next(ends, len(longer)) + 1
      rest = [x for x in longer[end:] if x not in self._end_ids]
      if after := self._vocabulary.decode(rest).strip():
        raise UserError(
          f"{what} writes {shorten(after)} after the token that ends the "
          "answer, where nothing is learned; let the token end all of it."
        )
      tokens = longer[:end]
      spans.append((begin, end))
    if self._start_id is not None and tokens[:2] == [self._start_id] * 2:
      raise UserError(
        f"{conversation.where}: {FILE_NAME} writes two start tokens; leave out "
        "one."
      )
    if tokens[-1] == self._eod_id:
      tokens.pop()  # because the [eod] of the document takes its place
    return np.array(tokens, np.int32), np.array(spans, np.int64)

  def _read(self, conversation: Conversation) -> list:
    found, where = [], conversation.where
    try:
      tools = read_tools(conversation.tools, self._template.variables)
      for i, each in enumerate(conversation.messages):
        where = f"{conversation.where}: messages[{i}]"
        message = read_message(each, self._template.fields)
        _check_calls(message.get("tool_calls", []), tools)
        found.append(message)
    except UserError as error:
      raise UserError(f"{where}: {error}") from None
    return found

  def _encode(
    self, messages: list, conversation: Conversation, answer: int, *, asks: bool
  ) -> list[int]:
    try:
      return self._template.encode(messages, conversation.tools, asks=asks)
    except UserError as error:
      raise UserError(
        f"{conversation.where}: messages[{answer}]: {error}"
      ) from None

  def _encode_texts(
    self, conversation: Conversation
  ) -> tuple[list[int], list[int]]:
    """Returns tokens of a plain pair: its prompt, and prompt with answer."""
    prompt, answer = (each["content"] for each in conversation.messages)
    asked, longer = map(self._vocabulary.encode, (prompt, prompt + answer))
    if longer[: len(asked)] != asked:
      longer = asked + self._vocabulary.encode_batch([answer], [True])[0]
    start = [] if self._start_id is None else [self._start_id]
    return start + asked, start + longer


def _check_calls(calls: object, names: Collection[str]) -> None:
  """Raises UserError unless calls are in OpenAI's form, and of known tools.

  Without `names`, all names are allowed: a message may describe the tools.
  """
  for call in calls if isinstance(calls, list) else [None]:
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function if isinstance(function, Mapping) else {}
    name, arguments = found.get("name"), found.get("arguments")
    if not isinstance(name, str):
      raise UserError(
        f'tool_calls: {shorten(call or calls)}: give [{{"type": "function", '
        '"function": {"name": "...", "arguments": {...}}}].'
      )
    if names and name not in names:
      raise UserError(
        f"tool_calls: {shorten(name)} is none of the conversation's tools"
        f"{did_you_mean(name, names)}; add it to 'tools', or call another."
      )
    try:
      is_text = isinstance(arguments, str)
      read = STRICT_DECODER.decode(arguments) if is_text else arguments
    except (ValueError, RecursionError):
      read = None
    if not isinstance(read, dict):
      raise UserError(
        f"tool_calls: arguments of {name} = {shorten(arguments)}: give an "
        "object, or the JSON of one."
      )
