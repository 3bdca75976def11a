# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Choices of an answer, in the form of OpenAI's /v1/completions."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from palm_mtf.data.vocabulary.text_reader import TextReader
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.generation.inference.continuation import ContinuationReader
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving.batcher import Row
from palm_mtf.generation.serving.completion_request import CompletionRequest

# Clients know no other reasons: a time limit is reported as "length" too.
_FINISH_REASONS = {"eod": "stop", "stop": "stop", "": None}


class _Entry(NamedTuple):
  """Entry of `logprobs` for one token; the start token has no log p."""

  text: str
  log_prob: float | None
  likeliest: Mapping[str, float] | None
  place: int  # of its first character in the text


class Choice:
  """Completion of one prompt, whole or piece by piece.

  `logprobs` has an entry for each token of the prompt, if it is echoed, and for
  each token that was sampled up to the end of the text, [eod] and the tokens of
  a stop string included: as many as `num_prompt_tokens` and `num_tokens` count.
  """

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
      row: tokens of prompt and text; another thread adds tokens.
      request: the completion that the client asks for.
      vocabulary: vocabulary of the model.
    """
    self.row = row
    self._index, self._request = index, request
    self._vocabulary = vocabulary
    # Ids that begin with the start token get no second one
    # (prompts.with_start): the client counts it as part of its prompt.
    given = request.prompts[index // request.n]
    self._gives_start = not isinstance(given, str) and (
      len(given) == len(row.prompt)
    )
    prompt = row.prompt[1:]
    self.num_prompt_tokens = len(prompt) + self._gives_start
    self._reader = ContinuationReader(vocabulary, request.stop, prompt)
    self._start = ""
    if request.echo:
      echoed = TextReader(vocabulary)
      for token in prompt:
        echoed.add(token)
      self._start = echoed.text
    self._entries: list[_Entry] = []
    self._num_read = 0  # tokens of the text
    self._shown = 0  # characters
    self._shown_entries = 0

  @property
  def num_tokens(self) -> int:
    """Tokens that were sampled up to the end of the text, so far."""
    return len(self._reader.ids)

  def is_over(self) -> bool:
    """Returns whether the text has ended; a stop string may have ended it."""
    if self._request.stop:
      self._add()
    return bool(self.row.ended or self._reader.ended)

  def read(self) -> dict | None:
    """Returns the choice as JSON, of the text since the last call.

    Returns None if there is nothing new.
    """
    ended = self.row.ended  # read first: no token comes after an end
    self._add()
    ended = self._reader.ended or ended
    if not ended and self.num_tokens == self._num_read:
      return None
    self._num_read = self.num_tokens
    if ended:
      text = self._start + self._reader.continuation(is_over=True).text
    else:
      text = self._start + self._reader.sure_text()
    new = text[self._shown :]
    if not new and not ended:
      return None
    choice = {
      "text": new,
      "index": self._index,
      "logprobs": None,
      "finish_reason": _FINISH_REASONS.get(ended, "length"),
    }
    if self._request.logprobs is not None:
      choice["logprobs"] = self._log_probs(len(text), is_over=bool(ended))
    self._shown = len(text)
    return choice

  def _add(self) -> None:
    """Reads the tokens that were chosen since the last call."""
    ended = self.row.ended
    new = self.row.chosen[self.num_tokens :]
    if self._request.logprobs is None:
      self._reader.add(each.token for each in new)
      return
    # The scores of the prompt are there before a token is chosen.
    if self._request.echo and not self._entries and (new or ended):
      self._add_prompt_entries()
    for each in new:
      if self._reader.ended:
        return
      entry = self._entry(each, self._reader.token_text)
      self._reader.add([each.token])
      place = len(self._start) + self._reader.places[-1]
      self._entries.append(entry._replace(place=place))

  def _add_prompt_entries(self) -> None:
    reader = TextReader(self._vocabulary)
    if self._gives_start:
      self._entries.append(_Entry("", None, None, 0))
    for each in self.row.prompt_scores:
      entry = self._entry(each, reader.token_text)
      self._entries.append(entry._replace(place=reader.add(each.token)))

  def _entry(self, chosen: Chosen, text_of: Callable[[int], str]) -> _Entry:
    text = text_of(chosen.token)
    likeliest: dict[str, float] = {}
    for token, log_prob in [*chosen.likeliest.items()][
      : self._request.logprobs
    ]:
      likeliest.setdefault(text_of(token), log_prob)
    # The token itself is listed too, as at OpenAI.
    likeliest.setdefault(text, chosen.log_prob)
    return _Entry(text, chosen.log_prob, likeliest, 0)

  def _log_probs(self, length: int, is_over: bool) -> dict:
    # Returns the entries of tokens that begin within the first `length`
    # characters, or of all tokens at the end of the text; without the entries
    # that earlier calls returned.
    first = self._shown_entries
    while self._shown_entries < len(self._entries) and (
      is_over or self._entries[self._shown_entries].place < length
    ):
      self._shown_entries += 1
    new = self._entries[first : self._shown_entries]
    return {
      "tokens": [x.text for x in new],
      "token_logprobs": [x.log_prob for x in new],
      "top_logprobs": [x.likeliest for x in new]
      if self._request.logprobs
      else None,
      "text_offset": [min(x.place, length) for x in new],
    }
