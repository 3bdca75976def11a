# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The model that a server offers: name, limits and defaults."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Sequence

from palm_mtf.config import Config
from palm_mtf.data.batches.packing import document_start
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.continuation import make_sampling_key
from palm_mtf.generation.inference.prompts import add_start
from palm_mtf.generation.serving.batcher import Row
from palm_mtf.generation.serving.choice import Choice
from palm_mtf.generation.serving.completion_request import (
  CompletionRequest,
  read_completion_request,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServedModel:
  """Limits and defaults of requests."""

  name: str  # name of the model that clients may give in requests
  vocabulary: Vocabulary  # vocabulary of the model
  # Settings of the run; its DecodeConfig, SAMPLE_TOKENS and SEED are the
  # defaults of requests.
  config: Config
  most_rows: int  # maximum number of a client's running and waiting completions
  most_secs: float  # maximum time of a request, in seconds

  @property
  def sequence_length(self) -> int:
    """Maximum number of tokens in a prompt and its completion."""
    return self.config.model.sequence_length

  @functools.cached_property
  def most_characters(self) -> float:
    """Upper bound of the number of characters in SEQUENCE_LENGTH tokens."""
    if not self.vocabulary.has_bytes:  # <unk> can be any number of characters
      return math.inf
    pieces = map(self.vocabulary.piece, range(self.vocabulary.size))
    return self.sequence_length * max(map(len, pieces))

  def describe(self, *, step: int, created: int) -> dict:
    """Returns the entry of this model in the answer of /v1/models.

    `step` is the training step of the served checkpoint, and `created` the
    checkpoint's time in seconds since 1970.
    """
    return {
      "id": self.name,
      "object": "model",
      "created": created,
      "owned_by": "palm_mtf",
      "step": step,
      "activation_dtype": self.config.model.activation_dtype,
    }

  def read(self, body: object) -> CompletionRequest:
    """Reads and checks a request's body, as parsed from JSON.

    Raises:
      UserError: if a field is wrong or exceeds a limit.
    """
    run = self.config.run
    asked = read_completion_request(
      body, self.config.decode, sample_tokens=run.sample_tokens, seed=run.seed
    )
    if asked.num_rows > self.most_rows:
      raise UserError(
        f"{asked.num_rows:,} completions (prompts times n): give at most "
        f"{self.most_rows}, the limit per client of this server."
      )
    return asked

  def make_choices(
    self, asked: CompletionRequest, client: str, changed: Callable[[], None]
  ) -> list[Choice]:
    """Makes the choices of an answer; the caller submits their rows.

    For `client` and `changed`, see `Row`.

    Raises:
      UserError: if a prompt leaves no room for its completion, or an id of the
        prompt is no token of the vocabulary.
    """
    rows = [
      Row(
        prompt=prompt,
        asked=asked,
        key=make_sampling_key(
          asked.seed, sample, self.vocabulary.decode(prompt[1:])
        ),
        deadline=time.monotonic() + self.most_secs,
        client=client,
        changed=changed,
      )
      for prompt in self._encode(asked)
      for sample in range(asked.n)
    ]
    return [Choice(i, row, self.vocabulary) for i, row in enumerate(rows)]

  def _encode(self, asked: CompletionRequest) -> list[Sequence[int]]:
    texts = [x for x in asked.prompts if isinstance(x, str)]
    # Check lengths first, because encoding a megabyte of text takes seconds.
    longest = max(map(len, texts), default=0)
    if longest > self.most_characters:
      raise UserError(
        f"prompt: is {longest:,} characters, more than SEQUENCE_LENGTH = "
        f"{self.sequence_length:,} tokens can hold: shorten it."
      )
    # Use one thread, because starting threads takes longer than encoding.
    encoded = iter(self.vocabulary.encode_arrays(texts, 1) if texts else [])
    start = document_start(self.config.data.packing, self.vocabulary.eod_id)
    prompts = [
      [start, *next(encoded).tolist()]
      if isinstance(x, str)
      else add_start(x, start)
      for x in asked.prompts
    ]
    for _, *ids in prompts:
      if not all(0 <= i < self.vocabulary.size for i in ids):
        raise UserError(
          f"prompt: token ids are from 0 to {self.vocabulary.size - 1:,}."
        )
      if len(ids) + asked.max_tokens > self.sequence_length:
        raise UserError(
          f"prompt: is {len(ids):,} tokens and max_tokens = "
          f"{asked.max_tokens:,}, together more than SEQUENCE_LENGTH = "
          f"{self.sequence_length:,}: shorten one of them."
        )
    return prompts
