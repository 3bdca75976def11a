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
conversation with its rejected answer. Both count only the last answer. Plain
pairs need no template: prompt and answer are encoded as they are, then [eod].
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from palm_mtf.data.sources.conversation import Conversation
from palm_mtf.data.vocabulary.chat import FILE_NAME, ChatTemplate, read_message
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError

# No client waits for a rendering, so a busy machine may take long for it.
_MOST_SECS = 60.0


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
    self.template: ChatTemplate | _PlainTexts = _PlainTexts(
      vocabulary, start_id
    )
    if not is_plain:
      self.template = ChatTemplate(vocabulary, start_id, _MOST_SECS)
    self._end_ids, self._eod_id = {*vocabulary.end_ids}, vocabulary.eod_id
    self._start_id = start_id

  def prompt(self, conversation: Conversation, answer: int) -> list[int]:
    """Returns what the model reads before message `answer`, in a chat."""
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
    found = []
    for i, each in enumerate(conversation.messages):
      try:
        found.append(read_message(each, self.template.fields))
      except UserError as error:
        raise UserError(
          f"{conversation.where}: messages[{i}]: {error}"
        ) from None
    return found

  def _encode(
    self, messages: list, conversation: Conversation, answer: int, *, asks: bool
  ) -> list[int]:
    try:
      return self.template.encode(messages, asks=asks)
    except UserError as error:
      raise UserError(
        f"{conversation.where}: messages[{answer}]: {error}"
      ) from None


class _PlainTexts:
  """Takes the place of a template: the contents of messages as they are."""

  text = fingerprint = ""
  fields: frozenset[str] = frozenset()

  def __init__(self, vocabulary: Vocabulary, start_id: int | None):
    self._vocabulary = vocabulary
    self._start = [] if start_id is None else [start_id]

  def encode(
    self, messages: Sequence[Mapping[str, Any]], *, asks: bool
  ) -> list[int]:
    texts = [each["content"] for each in messages]
    parts = self._vocabulary.encode_batch(texts)
    ends = [] if asks else [self._vocabulary.eod_id]
    return [*self._start, *(x for part in parts for x in part), *ends]
