# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Decodes texts (prompts and continuations) for a server.

The texts begin and end at different times. Each text is in a slot, a row of the
decoding batch.
"""

import functools
import itertools
import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from palm_mtf.config.decode import MOST_GREEDY
from palm_mtf.generation.decode.slot_program import (
  MOST_STEPS,
  InsertPrompts,
  KeepAdapter,
  MakeSlots,
  ReadParts,
  StepSlots,
  num_mask_words,
)
from palm_mtf.generation.inference.adapters import (
  BASE,
  NOTHING,
  Adapter,
  Factors,
)
from palm_mtf.generation.inference.sessions import LoadedDecoder
from palm_mtf.generation.inference.token_feed import TokenFeed

# A step computes only the first rows, up to the last slot in use. The number of
# these rows grows by this factor, so that few programs are built.
_ROWS_GROW_BY = 4
# Numbers of tokens that a program reads of prompts. Few programs serve all
# numbers, because `prepare` takes up to a second for each. From 33 tokens on,
# padding takes at most a third of a program's time; 16 take hardly longer than
# one, because all weights are read for it.
_PART_SIZES = (16, 32, 48, 64, 96, 128)
# C++ keeps the adapters of all decoders in one table.
_numbers = itertools.count(1)


class PromptPart(NamedTuple):
  """Some tokens of the prompt in a slot."""

  slot: int
  ids: Sequence[int]  # at least one
  first: int  # position of the first of them


class SlotText(NamedTuple):
  """State of a text in a slot before a call of `SlotDecoder.steps`."""

  token: int  # id of the last token, which the first step reads
  position: int  # position of `token` in the text, from 0
  place: int  # number of tokens drawn so far; with `key`, seeds the next draw
  key: np.ndarray  # random key of the text, [2] int32
  temperature: float  # TEMPERATURE; 0 takes the likeliest token
  # TOP_K: number of likeliest tokens to draw from; None for all.
  top_k: int | None
  top_p: float  # TOP_P: total probability of the likeliest tokens to draw from
  # Maximum number of tokens to choose, for which SEQUENCE_LENGTH has room. With
  # 0, the text takes no tokens from the call.
  limit: int
  # [words] int32 each: bit i % 32 of word i // 32 says whether the next token
  # may be i, and the token after each token of `draft`; () allows all tokens.
  masks: Sequence[np.ndarray] = ()
  adapter: int = 0  # number of the text's adapter; 0 for none
  draft: Sequence[int] = ()  # tokens to read too, if that is faster


class Chosen(NamedTuple):
  """Next token of a text."""

  token: int
  log_prob: float | None  # log p of the token; None if it was not computed
  # {id: log p} of the likeliest tokens; {} if not computed.
  likeliest: Mapping[int, float]


class SlotDecoder:
  """Decodes texts in slots (rows of the decoding batch), for one checkpoint."""

  def __init__(
    self,
    loaded: LoadedDecoder,
    num_tokens: int,
    num_slots: int,
    *,
    prompt_lookup: bool = False,
  ):
    """Makes the cache of keys and values for all slots.

    The vocabulary has `num_tokens` pieces. The number of slots is rounded up,
    because the mesh splits the slots evenly.
    """
    self._loaded, self._num_tokens = loaded, num_tokens
    n = loaded.num_slices
    self.num_slots = -(-num_slots // n) * n
    # Maximum number of tokens in a text, prompt included.
    self.sequence_length = loaded.config.text_length
    self._build = functools.cache(lambda x: loaded.build(x, "slots"))
    self._unused: list[int] = []  # numbers of adapters to drop
    self._dropping = threading.Lock()
    make = MakeSlots(self.num_slots, n, prompt_lookup)
    made = loaded.client.call(self._build(make))
    self._most_drafted = made["most_drafted"].item()
    # Maximum number of tokens for a call of `read_prompts`; 0 if prompts can
    # only be read whole, by `insert`.
    self.part_tokens = _PART_SIZES[-1] * made["reads_parts"].item()
    # Whether `steps` can send tokens before it returns.
    self.sends_tokens = bool(made["sends_tokens"].item())
    self._drafts: dict[int, list[int]] = {}  # {slot: tokens to try}

  def can_add_adapters(self) -> bool:
    """Returns whether steps are in C++, which only can add adapters.

    The first call builds a program, before other threads build any.
    """
    return self._keep(0, NOTHING) >= 0

  def add_adapter(self, factors: Factors) -> Adapter:
    """Keeps an adapter for texts. May be called in any thread."""
    self._drop_unused()
    if not len(factors.parts):
      return BASE  # it adds nothing
    adapter = Adapter(next(_numbers))
    self._keep(adapter.number, factors)
    weakref.finalize(adapter, self._unused.append, adapter.number)
    return adapter

  def _keep(self, number: int, factors: Factors) -> int:
    inputs = {"number": number, **factors._asdict()}
    program = self._build(KeepAdapter())
    return self._loaded.client.call(program, inputs)["kept"].item()

  def _drop_unused(self) -> None:
    with self._dropping:
      while self._unused:
        self._keep(self._unused.pop(), NOTHING)

  def prepare(self) -> None:
    """Builds programs, so that the first texts need not wait for them.

    These are all programs of texts without an adapter, log p or masks. Does
    nothing if prompts are read whole: there XLA may take seconds per program.
    """
    if not self.part_tokens:
      return
    last_slots = {self._count_rows(i): i for i in range(self.num_slots)}
    key = np.zeros([2], np.int32)
    texts = [
      {slot: SlotText(0, 0, 0, key, temperature, None, top_p, limit=0)}
      for slot in last_slots.values()
      for temperature, top_p in ((0.0, 1.0), (1.0, 1.0), (1.0, 0.5))
    ]
    # Build all programs before the first call, because the session takes over
    # all new operations in one call, which takes long for any number of them.
    for size in _PART_SIZES:
      self._build(ReadParts(size))
    for each in texts:
      self._build(self._step_function(each, wants_log_probs=False))
    for size in _PART_SIZES:
      self._read_columns([(0, 0, 0)], size)
    for each in texts:
      self.steps(each, 1, wants_log_probs=False)

  def insert(self, slot: int, ids: Sequence[int], adapter: int = 0) -> None:
    """Prefills a slot; the next step reads the last token again, for logits.

    The prompt has at least 1 and at most SEQUENCE_LENGTH `ids`. `adapter` is
    the number of its adapter, 0 for none.
    """
    if most := self.part_tokens:
      for i in range(0, last_to_read(ids), most):
        end = min(i + most, last_to_read(ids))
        self.read_prompts([PromptPart(slot, ids[i:end], i)], adapter)
      return
    self._drop_unused()
    self._drafts.pop(slot, None)
    # Pad to a power of two, so that few programs serve all lengths.
    ids = [*[0] * self._loaded.num_virtual, *ids]
    most = self._loaded.config.sequence_length
    room = min(1 << (len(ids) - 1).bit_length(), most)
    n = self._loaded.num_slices
    program = self._build(InsertPrompts(n, room, bool(adapter)))
    prompts = np.zeros([n, room], np.int32)
    prompts[:, : len(ids)] = ids
    rows = np.full([n], -1, np.int32)
    rows[slot % n] = slot // n
    inputs = {"prompts": prompts, "lengths": [len(ids)] * n, "rows": rows}
    inputs |= {"adapter": adapter} if adapter else {}
    self._loaded.client.call(program, inputs)

  def read_prompts(self, parts: Sequence[PromptPart], adapter: int = 0) -> None:
    """Prefills parts of slots; what a slot gets does not depend on the parts.

    Together the parts have at most `part_tokens` tokens. A slot's parts come in
    the order of their positions, and end before the `last_to_read` token.
    """
    self._drop_unused()
    columns = [
      (x, y.slot, i) for y in parts for i, x in enumerate(y.ids, y.first)
    ]
    for part in parts:
      self._drafts.pop(part.slot, None)
    size = next(x for x in _PART_SIZES if x >= len(columns))
    self._read_columns(columns, size, adapter)

  def _read_columns(
    self, columns: Sequence[tuple[int, int, int]], size: int, adapter: int = 0
  ) -> None:
    padded = [*columns, *columns[:1] * (size - len(columns))]
    inputs = {"parts": np.transpose(padded), "count": len(columns)}
    inputs |= {"adapter": adapter} if adapter else {}
    program = self._build(ReadParts(size, bool(adapter)))
    self._loaded.client.call(program, inputs)

  def draft(self, slot: int) -> Sequence[int] | None:
    """Returns tokens to try as `SlotText.draft` of a slot's text with masks.

    There are none if to read them would not pay (native/lookup.h), or if the
    last call for the slot had no masks. None: the decoder reads no draft.
    """
    return self._drafts.get(slot, ()) if self._most_drafted else None

  def steps(
    self,
    texts: Mapping[int, SlotText],
    count: int,
    *,
    wants_log_probs: bool,
    feed: TokenFeed | None = None,
  ) -> dict[int, list[Chosen]]:
    """Chooses the next tokens of each text.

    Args:
      count: maximum number of steps; SEQUENCE_LENGTH must have room for `count`
        more tokens in every text.
      wants_log_probs: whether to compute log p. If so, `count` is ignored, and
        one token per text is chosen. If a text has masks, there is one step.
      feed: gets the tokens of each step, and lets another thread end the call;
        allowed only if `sends_tokens`.

    Returns:
      {slot: tokens}: one per step, or more with prompt lookup, but at most the
      text's limit.
    """
    n, num_rows = self._loaded.num_slices, self._count_rows(max(texts))
    places = {slot: slot % n * (num_rows // n) + slot // n for slot in texts}
    # Log p is of one token, so prompt lookup must add no other.
    most = 1 if wants_log_probs else MOST_STEPS
    drafted = 0 if wants_log_probs else self._most_drafted
    has_masks = any(x.masks for x in texts.values())
    num_masks = (1 + drafted) * has_masks
    words = num_mask_words(self._num_tokens)
    masks = np.full([num_rows, num_masks, words], -1, np.int32)
    # A row without a text is fed zeros. The step then writes keys and values
    # into an unused slot, which the next prefill overwrites.
    numbers = np.zeros([num_rows, 8 + drafted * has_masks], np.int32)
    numbers[:, 8:] = -1
    shares = np.zeros([num_rows, 2], np.float32)
    for slot, x in texts.items():
      top_k = min(x.top_k or self._num_tokens, self._num_tokens)
      row = places[slot]
      limit = min(x.limit, most)
      position = x.position + self._loaded.num_virtual
      state = x.token, position, x.place, *x.key, top_k, limit
      numbers[row, :8] = (*state, x.adapter)
      draft = x.draft if x.masks else self.draft(slot) or ()
      for i, token in enumerate(draft[: numbers.shape[1] - 8]):
        numbers[row, 8 + i] = token
      for i, mask in enumerate(x.masks[:num_masks]):
        masks[row, i] = mask
      shares[row] = (x.temperature, x.top_p)
    function = self._step_function(texts, wants_log_probs, num_masks)
    call = [min(count, most), feed.socket if feed else -1]
    inputs = {"call": call, "texts": numbers, "shares": shares}
    if has_masks:
      inputs["masks"] = masks.reshape(-1, words)
    found = self._loaded.client.call(self._build(function), inputs)
    for slot, row in places.items():
      if texts[slot].limit:
        draft = found["drafts"][row].tolist() if "drafts" in found else []
        self._drafts[slot] = [i for i in draft if i >= 0]
    return {
      slot: _read_row({x: y[row] for x, y in found.items()}, texts[slot])
      for slot, row in places.items()
    }

  def _step_function(
    self,
    texts: Mapping[int, SlotText],
    wants_log_probs: bool,
    num_masks: int = 0,
  ) -> StepSlots:
    is_greedy = all(x.temperature <= MOST_GREEDY for x in texts.values())
    return StepSlots(
      num_rows=self._count_rows(max(texts)),
      num_tokens=self._num_tokens,
      is_greedy=is_greedy,
      has_limits=not is_greedy
      and any(x.top_k is not None or x.top_p < 1 for x in texts.values()),
      wants_log_probs=wants_log_probs,
      num_masks=num_masks,
    )

  def _count_rows(self, last_slot: int) -> int:
    rows = self._loaded.num_slices
    while rows <= last_slot:
      rows *= _ROWS_GROW_BY
    return min(rows, self.num_slots)


def last_to_read(ids: Sequence[int]) -> int:
  """Returns how many tokens of a prompt to read: the next step reads the last.

  Of a prompt with a single token, this token is read twice, to clear the slot.
  """
  return max(1, len(ids) - 1)


def _read_row(found: Mapping[str, np.ndarray], text: SlotText) -> list[Chosen]:
  # Reads a row of the outputs of StepSlots.
  if "of_chosen" not in found:
    tokens = found["tokens"][: text.limit].tolist()
    return [Chosen(token, None, {}) for token in tokens if token >= 0]
  ids, log_probs = found["likeliest"].tolist(), found["of_likeliest"].tolist()
  likeliest = dict(zip(ids, log_probs, strict=True))
  token, log_prob = found["tokens"][0].item(), found["of_chosen"].item()
  return [Chosen(token, log_prob, likeliest)]
