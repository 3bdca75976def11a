# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Choices of an answer, in the form of OpenAI's /v1/completions."""

from collections.abc import Mapping, Sequence

from palm_mtf.data.vocabulary.vocabulary import SPACE_MARK, Vocabulary
from palm_mtf.inference.continuation import (
  Continuation,
  read_continuation,
  sure_text,
)
from palm_mtf.inference.slot_decoder import Chosen
from palm_mtf.serving.batcher import Row
from palm_mtf.serving.completion_request import CompletionRequest

# Clients know no other reasons; "length" is also that of a time limit.
_FINISH_REASONS = {"eod": "stop", "stop": "stop", "": None}


class Choice:
  """Completion of one prompt, whole or piece by piece."""

  def __init__(
    self,
    index: int,
    row: Row,
    request: CompletionRequest,
    vocabulary: Vocabulary,
  ):
    """Begins a choice whose text is empty.

    Args:
      index: number of the choice in its answer.
      row: tokens of prompt and text, which another thread adds to.
      request: the completion that the client asks for.
      vocabulary: vocabulary of the model.
    """
    self.row = row
    self._index, self._request = index, request
    self._vocabulary = vocabulary
    # The first token stands before every text.
    self._prompt = list(row.prompt[1:])
    self._start = vocabulary.decode(self._prompt) if request.echo else ""
    self._shown = 0  # characters
    self._shown_tokens = 0
    self._num_read = -1
    self.num_tokens = 0  # of the text so far, which usage counts

  @property
  def num_prompt_tokens(self) -> int:
    """Tokens of the prompt."""
    return len(self._prompt)

  def is_over(self) -> bool:
    """Returns whether the text has ended, by a stop string perhaps."""
    return bool(self.row.ended) or (
      bool(self._request.stop) and self._continuation()[0].ended != ""
    )

  def read(self) -> dict | None:
    """Returns the choice as JSON, of the text since the last call.

    Returns None if there is nothing new.
    """
    found, chosen = self._continuation()
    if not found.ended and len(chosen) == self._num_read:
      return None
    self._num_read = len(chosen)
    self.num_tokens = found.num_tokens
    text = self._start + sure_text(found, self._request.stop)
    new = text[self._shown :]
    if not new and not found.ended:
      return None
    choice = {
      "text": new,
      "index": self._index,
      "logprobs": None,
      "finish_reason": _FINISH_REASONS.get(found.ended, "length"),
    }
    if self._request.logprobs is not None:
      choice["logprobs"] = self._log_probs(chosen, text)
    self._shown = max(self._shown, len(text))
    return choice

  def _continuation(self) -> tuple[Continuation, list[Chosen]]:
    ended = self.row.ended  # read first: no token comes behind an end
    chosen = list(self.row.chosen)
    found = read_continuation(
      self._vocabulary,
      self._request.stop,
      [each.token for each in chosen],
      bool(ended),
    )
    return found, chosen

  def _log_probs(self, chosen: Sequence[Chosen], text: str) -> dict:
    # Of the tokens that begin in `text`, less those told before.
    eod_id = self._vocabulary.eod_id
    every = [*self.row.prompt_scores, *(x for x in chosen if x.token != eod_id)]
    first = self._shown_tokens
    offsets = text_offsets(self._vocabulary, [each.token for each in every])
    count = sum(offset < len(text) for offset in offsets)
    self._shown_tokens = max(first, count)
    told = every[first:count]
    most = self._request.logprobs
    return {
      "tokens": [token_text(self._vocabulary, x.token) for x in told],
      "token_logprobs": [x.log_prob for x in told],
      "top_logprobs": [self._likeliest(x, most) for x in told]
      if most
      else None,
      "text_offset": offsets[first:count],
    }

  def _likeliest(self, chosen: Chosen, most: int) -> Mapping[str, float]:
    found: dict[str, float] = {}
    for token, log_prob in list(chosen.likeliest.items())[:most]:
      found.setdefault(token_text(self._vocabulary, token), log_prob)
    # As OpenAI does: the token itself is there too.
    found.setdefault(
      token_text(self._vocabulary, chosen.token), chosen.log_prob
    )
    return found


def token_text(vocabulary: Vocabulary, token: int) -> str:
  """Returns the text of one token; a byte of a character as "bytes:\\xc3"."""
  if token >= vocabulary.size:
    return ""
  piece = vocabulary.piece(token)
  if vocabulary.is_byte[token]:
    return f"bytes:\\x{piece[3:5].lower()}"
  return piece.replace(SPACE_MARK, " ")


def text_offsets(vocabulary: Vocabulary, ids: Sequence[int]) -> list[int]:
  """Returns the place of each token's first character in their text."""
  # Bytes make a character together: a run of them is read as one.
  offsets, before, run = [], 0, []
  for token in ids:
    if token < vocabulary.size and vocabulary.is_byte[token]:
      offsets.append(before + len(vocabulary.decode(run).rstrip("\ufffd")))
      run.append(token)
    else:
      before += len(vocabulary.decode(run))
      run = []
      offsets.append(before)
      before += len(vocabulary.decode([token]))
  return offsets
