# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Generates continuations in a form, one step per call, as a server does."""

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

  def next(
    self, decode: DecodeConfig, limit: int, draft: Sequence[int]
  ) -> SlotText:
    """Returns what the decoder needs to choose the next tokens."""
    ids = [*self.prompt, *self.reader.ids]
    draft, masks = self.constraint.look_ahead(draft)
    return SlotText(
      token=ids[-1],
      position=len(ids) - 1,
      place=len(self.reader.ids),
      key=self.key,
      temperature=decode.temperature,
      top_k=decode.top_k,
      top_p=decode.top_p,
      limit=limit,
      masks=masks,
      draft=draft,
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
      lambda slots: SlotDecoder(
        *(loaded, vocabulary.size, slots), prompt_lookup=decode.prompt_lookup
      )
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
    while True:
      left = [
        0 if x.reader.ended else self._sample_tokens - len(x.reader.ids)
        for x in texts
      ]
      try:
        given = {
          slot: text.next(decode, left[slot], decoder.draft(slot))
          for slot, text in enumerate(texts)
          if left[slot]
        }
      except ConstraintError:
        raise UserError(
          f"{self._grammar.field}: became too complex for this text; simplify "
          "it."
        ) from None
      if not given:
        return
      for slot, found in decoder.steps(given, 1, wants_log_probs=False).items():
        for chosen in found:
          texts[slot].constraint.accept(chosen.token)
        texts[slot].reader.add(x.token for x in found)
      rows = [
        (x, x.continuation(len(x.ids) == self._sample_tokens))
        for x in (text.reader for text in texts)
      ]
      n = decode.num_samples
      yield [rows[i : i + n] for i in range(0, len(rows), n)]
