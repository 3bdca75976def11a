# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model that a server offers, and the texts ("choices") of answers."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from palm_mtf.assertions.assertions import Assertions, Example
from palm_mtf.config import Config
from palm_mtf.data.batches.packing import prompt_start
from palm_mtf.data.vocabulary.chat import ChatTemplate
from palm_mtf.data.vocabulary.text_reader import TextReader
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError, shorten
from palm_mtf.generation.inference.constraint import Grammars
from palm_mtf.generation.inference.continuation import (
  ContinuationReader,
  make_sampling_key,
  measure_begun_stop,
)
from palm_mtf.generation.inference.prompts import add_start
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving.adapters import NamedAdapter, ServedAdapters
from palm_mtf.generation.serving.batcher import Row
from palm_mtf.generation.serving.completion_request import (
  CompletionRequest,
  as_message,
  make_completion_body,
  read_completion_request,
)
from palm_mtf.generation.serving.messages import RefusalError
from palm_mtf.generation.serving.tools import BEGIN, Tools, read_calls
from palm_mtf.retrieval.passages import Passages

# OpenAI's API has only "stop" and "length", so every other end of a text, such
# as a time limit, is reported as "length".
_FINISH_REASONS = {"eod": "stop", "stop": "stop", "": None}


class _Entry(NamedTuple):
  """Entry for one token in the field `logprobs` of an answer."""

  text: str
  log_prob: float | None  # None for the first token that the model reads
  likeliest: Mapping[str, float] | None  # {text of a likely token: its log p}
  place: int  # index in the answer's text at which the token begins


class Choice:
  """One completion: turns the tokens of its row into JSON as they come.

  `num_tokens` includes [eod] and the tokens of a stop string. An answer reports
  this number and `num_prompt_tokens`. Its `logprobs` have an entry for each of
  the `num_tokens` and, if the prompt is echoed, for each token of the prompt.
  """

  def __init__(self, index: int, row: Row, vocabulary: Vocabulary):
    # `index` is the choice's index in the answer. The batcher's thread appends
    # tokens to `row` while the server's thread reads them.
    self.row = row
    self._index, self._request = index, row.asked
    self._vocabulary = vocabulary
    # Whether the client's token ids begin with the start token, which then
    # counts as part of the prompt.
    given = row.asked.prompts[index // row.asked.n]
    gives_start = not isinstance(given, str) and (len(given) == len(row.prompt))
    prompt = row.prompt[row.num_start :]
    self.num_prompt_tokens = max(len(prompt), len(row.prompt) * gives_start)
    # A text with a grammar is not the rest of a word, or a character, of the
    # prompt.
    before = prompt if row.constraint is None else None
    self._reader = ContinuationReader(vocabulary, row.asked.stop, before)
    self._start = ""
    if row.asked.echo:
      echoed = TextReader(vocabulary)
      for token in prompt:
        echoed.add(token)
      self._start = echoed.text
    self._entries: list[_Entry] = []
    self._num_read = 0  # `num_tokens` when `read` last looked for new tokens
    self._shown = 0  # number of characters that `read` has returned
    self._shown_entries = 0  # number of `_entries` that `read` has returned

  @property
  def num_tokens(self) -> int:
    """Number of tokens so far, including the token that ended the text."""
    return len(self._reader.ids)

  def is_over(self) -> bool:
    """Returns whether the row has ended, or a stop string ended the text."""
    if self._request.stop:
      self._read_tokens()
    return bool(self.row.ended or self._reader.ended)

  def as_example(self) -> Example:
    """Returns the prompt and the text of a choice that is over."""
    self._read_tokens()
    prompt = self.row.prompt[self.row.num_start :]
    return Example(
      self._vocabulary.decode(prompt),
      self._reader.continuation(is_over=True).text,
      [x.log_prob for x in self._entries],
    )

  def read(self) -> dict | None:
    """Returns the text since the last call as a JSON choice; None if empty."""
    # Read `ended` before the tokens, so that no token is missed: once a row has
    # ended, no more tokens come.
    ended = self.row.ended
    self._read_tokens()
    ended = self._reader.ended or ended
    if not ended and self.num_tokens == self._num_read:
      return None
    self._num_read = self.num_tokens
    if ended:
      text = self._start + self._reader.continuation(is_over=True).text
    else:
      text = self._start + self._reader.sure_text()
    calls: Sequence[Mapping[str, object]] = ()
    if tools := self._request.tools:
      if ended:
        text, calls = read_calls(text, tools.names)
      else:  # calls are sent whole, so hold back their text
        text = text.partition(BEGIN)[0]
        text = text[: len(text) - measure_begun_stop(text, BEGIN)]
    new = text[self._shown :]
    if not new and not ended:
      return None
    choice = {
      "text": new,
      "index": self._index,
      "logprobs": None,
      "finish_reason": _FINISH_REASONS.get(ended, "length"),
    }
    if self._request.wants_log_probs:
      choice["logprobs"] = self._take_log_probs(len(text), is_over=bool(ended))
    if self._request.is_chat:
      choice = as_message(
        choice, calls, is_part=self._request.stream, is_first=not self._shown
      )
    self._shown = len(text)
    return choice

  def _read_tokens(self) -> None:
    ended = self.row.ended
    new = self.row.chosen[self.num_tokens :]
    if not self._request.wants_log_probs:
      self._reader.add(each.token for each in new)
      return
    # Once the row has a token, the prompt's scores are complete, because the
    # batcher scores the prompt before it chooses tokens.
    if self._request.echo and not self._entries and (new or ended):
      self._add_prompt_entries()
    for each in new:
      if self._reader.ended:
        return
      entry = self._make_entry(each, self._reader.token_text)
      self._reader.add([each.token])
      place = len(self._start) + self._reader.places[-1]
      self._entries.append(entry._replace(place=place))

  def _add_prompt_entries(self) -> None:
    reader = TextReader(self._vocabulary)
    if self.num_prompt_tokens == len(self.row.prompt):
      first = self.row.prompt[0]
      text = reader.token_text(first)
      self._entries.append(_Entry(text, None, None, reader.add(first)))
    for each in self.row.prompt_scores:
      entry = self._make_entry(each, reader.token_text)
      self._entries.append(entry._replace(place=reader.add(each.token)))

  def _make_entry(
    self, chosen: Chosen, text_of: Callable[[int], str]
  ) -> _Entry:
    text = text_of(chosen.token)
    likeliest: dict[str, float] = {}
    for token, log_prob in [*chosen.likeliest.items()][
      : self._request.logprobs
    ]:
      likeliest.setdefault(text_of(token), log_prob)
    # List the chosen token even if it is none of the likeliest, as OpenAI does.
    likeliest.setdefault(text, chosen.log_prob)
    return _Entry(text, chosen.log_prob, likeliest, 0)

  def _take_log_probs(self, length: int, is_over: bool) -> dict:
    # Returns the entries that no call has returned yet. Unless the text
    # `is_over`, holds back tokens that begin after its first `length`
    # characters, because the client does not get more of the text now.
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
  """Reads requests; applies the model's limits and the run's defaults."""

  name: str  # name of the model that clients may give in requests
  vocabulary: Vocabulary
  # Settings of the run; its DecodeConfig, SAMPLE_TOKENS and SEED are the
  # defaults of requests.
  config: Config
  most_rows: int  # maximum number of a client's running and waiting completions
  most_secs: float  # maximum time of a request, in seconds
  adapters: ServedAdapters | None = None  # other models that clients may name
  assertions: Assertions | None = None  # check answers
  passages: Passages | None = None  # for texts of prompts, if RETRIEVE is set

  @property
  def sequence_length(self) -> int:
    """Maximum number of tokens in a prompt and its completion."""
    return self.config.model.text_length

  @functools.cached_property
  def most_characters(self) -> float:
    """A text with more characters has more than SEQUENCE_LENGTH tokens."""
    if not self.vocabulary.has_bytes:  # <unk> can be any number of characters
      return math.inf
    pieces = map(self.vocabulary.piece, range(self.vocabulary.size))
    return self.sequence_length * max(map(len, pieces))

  def find_adapter(self, name: object) -> NamedAdapter | None:
    """Returns the adapter that a request names; None for the base.

    Raises RefusalError if there is no model of this name.
    """
    found = self.adapters.find(name) if self.adapters else None
    if not found and name not in (None, self.name):
      has_others = self.adapters and self.adapters.list_all()
      others = " or an adapter of /v1/models" if has_others else ""
      raise RefusalError(
        404, f"there is no model {shorten(name)}: give {self.name!r}{others}."
      )
    return found

  def describe(
    self, adapter: NamedAdapter | None, *, step: int, created: int
  ) -> dict:
    """Returns the entry of this model, or its adapter, for /v1/models.

    `step` is the training step of the served checkpoint, and `created` the
    checkpoint's time in seconds since 1970.
    """
    dtype = self.config.model.activation_dtype
    others = {"step": step, "activation_dtype": dtype}
    return {
      "id": adapter.name if adapter else self.name,
      "object": "model",
      "created": adapter.created if adapter else created,
      "owned_by": "palm_mtf",
      **({"parent": self.name} if adapter else others),
    }

  @functools.cached_property
  def _chat_template(self) -> ChatTemplate:
    start_id = prompt_start(self.config.data, self.vocabulary)
    return ChatTemplate(self.vocabulary, start_id)

  @functools.cached_property
  def _grammars(self) -> Grammars:
    return Grammars(self.vocabulary)

  def read(
    self,
    body: object,
    *,
    is_chat: bool = False,
    adapter: NamedAdapter | None = None,
  ) -> CompletionRequest:
    """Reads and checks a request's body, as parsed from JSON.

    `is_chat` says whether it has messages of a conversation, not a prompt, and
    `adapter` is what the request names as its model. Raises UserError if a
    field is wrong or exceeds a limit.
    """
    run = self.config.run
    tools: Tools | None = None
    if is_chat:
      body, tools = make_completion_body(
        body,
        self._chat_template,
        self.passages,
        default_tokens=run.sample_tokens,
        most_messages=self.sequence_length,
        most_characters=self.most_characters,
      )
    asked = read_completion_request(
      body,
      self.config.decode,
      sample_tokens=run.sample_tokens,
      seed=run.seed,
      tools=tools,
    )
    if asked.num_rows > self.most_rows:
      raise UserError(
        f"{asked.num_rows:,} completions (prompts times n): give at most "
        f"{self.most_rows}, the limit per client of this server."
      )
    if asked.echo and asked.wants_log_probs and self.config.decode.knn_index:
      raise UserError(
        "echo: this server has an index, which gives no log p of prompts; ask "
        "for echo or logprobs."
      )
    return dataclasses.replace(asked, is_chat=is_chat, adapter=adapter)

  def make_choices(
    self, asked: CompletionRequest, client: str, changed: Callable[[], None]
  ) -> list[Choice]:
    """Makes an answer's choices; the caller gives their rows to the batcher.

    `client` is the request's sender. `changed` is called, in any thread, when a
    row has ended, or has new tokens that must be read before its end.

    Raises UserError if a prompt leaves no room for its completion, or an id of
    the prompt is not a token of the vocabulary, or the grammar is wrong. A new
    grammar takes up to seconds.
    """
    grammar = asked.grammar if asked.max_tokens else None
    rows = [
      Row(
        prompt=prompt,
        num_start=num_start,
        asked=asked,
        key=make_sampling_key(
          asked.seed, sample, self.vocabulary.decode(prompt[num_start:])
        ),
        deadline=time.monotonic() + self.most_secs,
        client=client,
        changed=changed,
        constraint=grammar and self._grammars.start(grammar),
      )
      for prompt, num_start in self._encode(asked)
      for sample in range(asked.n)
    ]
    return [Choice(i, row, self.vocabulary) for i, row in enumerate(rows)]

  def _encode(
    self, asked: CompletionRequest
  ) -> Iterator[tuple[Sequence[int], int]]:
    """Yields each prompt, and the number of its start tokens, 0 or 1."""
    texts = [x for x in asked.prompts if isinstance(x, str)]
    # Check lengths first, because encoding a megabyte of text takes seconds.
    longest = max(map(len, texts), default=0)
    if longest > self.most_characters:
      raise UserError(
        f"prompt: is {longest:,} characters, more than "
        f"{self.config.model.text_room} tokens can hold: shorten it."
      )
    if self.passages and not asked.is_chat:
      most = self.sequence_length - asked.max_tokens
      texts = [
        self.passages.put_before(
          x, lambda text: len(self.vocabulary.encode(text)) <= most
        )
        for x in texts
      ]
    # Use one thread, because starting threads takes longer than encoding.
    encoded = iter(self.vocabulary.encode_arrays(texts, 1) if texts else [])
    start = prompt_start(self.config.data, self.vocabulary)
    for given in asked.prompts:
      is_text = isinstance(given, str)
      prompt = next(encoded).tolist() if is_text else given
      if not asked.is_chat:
        has_start = start is not None or not prompt
        prompt = add_start(prompt, start, self.vocabulary.eod_id)
      else:
        has_start = self.vocabulary.is_control(prompt[0])
      ids = prompt[int(has_start) :]
      if not all(0 <= i < self.vocabulary.size for i in ids):
        raise UserError(
          f"prompt: token ids are from 0 to {self.vocabulary.size - 1:,}."
        )
      if len(ids) + asked.max_tokens > self.sequence_length:
        raise UserError(
          f"prompt: is {len(ids):,} tokens and max_tokens = "
          f"{asked.max_tokens:,}, together more than "
          f"{self.config.model.text_room}: shorten one of them."
        )
      yield prompt, int(has_start)
