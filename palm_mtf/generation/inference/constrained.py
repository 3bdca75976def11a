# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Generates continuations in a form, one token per call, as a server does."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from palm_mtf.config import DecodeConfig
from palm_mtf.data.vocabulary.vocabulary import Vocabulary
from palm_mtf.errors import UserError
from palm_mtf.generation.inference.constraint import (
  Constraint,
  ConstraintError,
  Grammar,
  Grammars,
)
from palm_mtf.generation.inference.continuation import (
  ContinuationReader,
  make_sampling_key,
)
from palm_mtf.generation.inference.generator import Generator
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.slot_decoder import SlotDecoder, SlotText


class _Text(NamedTuple):
  """A prompt in a slot, and its continuation so far."""

  prompt: Sequence[int]  # with the start token
  key: np.ndarray
  reader: ContinuationReader
  constraint: Constraint

  def next(self, decode: DecodeConfig) -> SlotText:
    """Returns what the decoder needs to choose the next token."""
    ids = [*self.prompt, *self.reader.ids]
    return SlotText(
      token=ids[-1],
      position=len(ids) - 1,
      place=len(self.reader.ids),
      key=self.key,
      temperature=decode.temperature,
      top_k=decode.top_k,
      top_p=decode.top_p,
      limit=1,
      mask=self.constraint.mask(),
    )


class ConstrainedGenerator(Generator):
  """Continues prompts so that continuations that end satisfy a grammar."""

  def __init__(
    self,
    loaded: LoadedDecoder,
    vocabulary: Vocabulary,
    decode: DecodeConfig,
    *,
    grammar: Grammar,
    **settings: Any,
  ):
    """Takes the arguments of Generator; NUM_BEAMS must be 1.

    Raises UserError if the grammar is wrong or too complex.
    """
    super().__init__(loaded, vocabulary, decode, **settings)
    self._grammar = grammar
    self._start = functools.partial(Grammars(vocabulary).start, grammar)
    self._start()  # so that a wrong grammar is refused before any text
    self._open = functools.cache(
      lambda slots: SlotDecoder(loaded, vocabulary.size, slots)
    )

  def _continue_batch(
    self,
    prompts: Sequence[Sequence[int]],
    size: int,
    step: int,
    start_id: int | None,
    *,
    are_inputs: bool = False,
  ) -> Iterator[list[list]]:
    vocabulary, decode = self._vocabulary, self._decode
    decoder = self._open(size * decode.num_samples)
    texts: list[_Text] = []
    for ids in prompts:
      start = [] if start_id is None else [start_id]
      prompt = [*start, *ids] or [vocabulary.eod_id]
      for sample in range(decode.num_samples):
        decoder.insert(len(texts), prompt)
        key = make_sampling_key(self._seed, sample, vocabulary.decode(ids))
        before = () if are_inputs else ids
        reader = ContinuationReader(vocabulary, decode.stop_strings, before)
        texts.append(_Text(prompt, key, reader, self._start()))
    for count in range(1, self._sample_tokens + 1):
      try:
        given = {
          slot: text.next(decode)
          for slot, text in enumerate(texts)
          if not text.reader.ended
        }
      except ConstraintError:
        raise UserError(
          f"{self._grammar.field}: became too complex for this text; simplify "
          "it."
        ) from None
      if given:
        found = decoder.steps(given, 1, wants_log_probs=False)
        for slot, (chosen,) in found.items():
          texts[slot].reader.add([chosen.token])
          texts[slot].constraint.accept(chosen.token)
      is_last = count == self._sample_tokens or not given
      rows = [(x.reader, x.reader.continuation(is_last)) for x in texts]
      n = decode.num_samples
      yield [rows[i : i + n] for i in range(0, len(rows), n)]
