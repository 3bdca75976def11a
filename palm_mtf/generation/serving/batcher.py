# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: texts join and leave a batch between its steps."""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from palm_mtf.generation.inference.slot_decoder import Chosen, SlotText
from palm_mtf.generation.serving.counters import Counters
from palm_mtf.generation.serving.waiting_rows import WaitingRows


@dataclasses.dataclass(eq=False, kw_only=True)
class Row:
  """Text to continue, and what was chosen of it so far.

  Attributes:
    prompt: token ids, with what stands before a text.
    max_tokens: tokens to choose at most; 0 where the prompt is scored alone.
    key: key of the draws, [2] int32.
    temperature: 0 takes the likeliest token.
    top_k: tokens that may be drawn; None for all.
    top_p: share of the likeliest tokens that may be drawn.
    wants_log_probs: whether to tell log p of the tokens.
    scores_prompt: whether to tell it of the prompt's tokens too.
    is_watched: whether each token is waited for, and not the last one alone.
    deadline: time.monotonic() at which the row ends, in seconds.
    client: who asked for the row.
    request: which request of the client asked for it.
    changed: called, by the batcher's thread, when there is more.
    prompt_scores: log p of the prompt's tokens, once they are there.
    chosen: tokens so far, [eod] among them.
    ended: "" while the row goes on; "eod", "length", "time", "cancelled" or
      "failed".
  """

  prompt: Sequence[int]
  max_tokens: int
  key: np.ndarray
  temperature: float
  top_k: int | None
  top_p: float
  wants_log_probs: bool
  scores_prompt: bool
  is_watched: bool
  deadline: float
  client: str
  request: object
  changed: Callable[[], None]
  prompt_scores: Sequence[Chosen] = ()
  chosen: list[Chosen] = dataclasses.field(default_factory=list)
  ended: str = ""


# Seconds that steps may take together before others can join: streams look even
# and nobody waits, and what comes between two calls is a fiftieth of them.
_MOST_SECS = 0.02
# So many clients may each have as many rows waiting as one may.
_MOST_CLIENTS = 8


class FullError(Exception):
  """As many rows wait as may."""


class Decoder(Protocol):
  """What a batcher needs of SlotDecoder.

  Attributes:
    num_slots: texts at once.
    sequence_length: tokens of a text at most, with its prompt.
  """

  num_slots: int
  sequence_length: int

  def insert(self, slot: int, ids: Sequence[int]) -> None:
    """Prefills a slot."""

  def steps(
    self, texts: dict[int, SlotText], count: int, *, wants_log_probs: bool
  ) -> dict[int, list[Chosen]]:
    """Chooses up to `count` next tokens of each text."""


class Engine(Protocol):
  """Weights of one checkpoint at a time, ready to compute.

  Attributes:
    decoder: decoder of the slots.
    step: training step of the checkpoint.
    created: time of the checkpoint, in seconds since 1970.
  """

  decoder: Decoder
  step: int
  created: int

  def score(self, ids: Sequence[int]) -> Sequence[Chosen]:
    """Returns log p of the tokens of a prompt, but the first."""


class Batcher:
  """Runs rows in the slots of a decoder, in a thread that calls `run`.

  Attributes:
    engine: weights that compute.
    most_rows: rows of a client that run and wait at most.
    failure: exception that ended `run`, or None.
  """

  def __init__(
    self,
    engine: Engine,
    counters: Counters,
    *,
    eod_id: int,
    most_waiting: int,
  ):
    """Readies a batch without rows.

    Args:
      engine: weights.
      counters: counts to keep.
      eod_id: token that ends a text.
      most_waiting: rows of a client that may wait for a slot.
    """
    self.engine = engine
    self._counters = counters
    self._counters.checkpoint_step = engine.step
    self._eod_id = eod_id
    self._most_waiting = most_waiting
    self.most_rows = engine.decoder.num_slots + most_waiting
    self._changed = threading.Condition()
    self._waiting = WaitingRows()
    self._running: dict[int, Row] = {}
    self._load: Callable[[], None] | None = None
    self._is_stopping = False
    self._step_secs = _MOST_SECS  # of a step in a call without log p
    # Seconds of steps, before a further prompt is read, and before a further
    # call for log p.
    self._owed_secs = self._owed_plain_secs = 0.0
    self.failure: BaseException | None = None

  def submit(self, rows: Sequence[Row]) -> None:
    """Lets the rows of one request wait for slots.

    Raises:
      FullError: the rows are too many beside those that are there.
    """
    client = rows[0].client
    with self._changed:
      running = sum(x.client == client for x in self._running.values())
      of_client = running + self._waiting.count(client) + len(rows)
      of_all = len(self._waiting) + len(rows)
      if (
        of_client > self.most_rows
        or of_all > self.most_rows + (_MOST_CLIENTS - 1) * self._most_waiting
        or self._is_stopping
      ):
        raise FullError
      self._waiting.add(rows)
      self._changed.notify()

  def replace_weights(self, load: Callable[[], None]) -> None:
    """Calls `load` as soon as no row is in a slot, in the batcher's thread.

    Rows in slots end with the weights that they began with; rows that wait
    begin with the new ones.

    Args:
      load: replaces the weights of the engine.
    """
    with self._changed:
      self._load = load
      self._changed.notify()

  def cancel(self, rows: Sequence[Row]) -> None:
    """Ends rows that nobody waits for any more."""
    with self._changed:
      for row in rows:
        if not row.ended:
          row.ended = "cancelled"
          self._counters.cancelled += 1
      self._changed.notify()

  def stop(self) -> None:
    """Ends `run` when no row is left."""
    with self._changed:
      self._is_stopping = True
      self._changed.notify()

  def give_up(self) -> None:
    """Ends all rows now, and `run` with them."""
    with self._changed:
      self._is_stopping = True
      for row in [*self._waiting, *self._running.values()]:
        self._end(row, "failed")
      self._changed.notify()

  def run(self) -> None:
    """Runs rows until `stop`; sets `failure` where a step fails."""
    try:
      while self._turn():
        pass
    except BaseException as error:
      # Whatever it is: a server whose batch stands still must not go on.
      self.failure = error
      self.give_up()

  def _num_rows(self) -> int:
    return len(self._waiting) + len(self._running)

  def _turn(self) -> bool:
    """Takes one row in and gives all more tokens; returns False to end."""
    load = row = None
    with self._changed:
      self._sweep()
      while not self._num_rows() and (self._is_stopping or not self._load):
        if self._is_stopping:
          return False
        self._changed.wait()
      if self._load and not self._running:
        load, self._load = self._load, None
      elif self._may_begin():
        slot = self._begin()
        row = self._running[slot]
    if load:
      load()
      self._counters.checkpoint_step = self.engine.step
    if row:
      self._read_prompt(row, slot)
    if self._running:
      self._steps()
    return True

  def _may_begin(self) -> bool:
    if not self._running:
      self._owed_secs = 0.0
    has_free = len(self._running) < self.engine.decoder.num_slots
    is_kept = self._load is not None or self._owed_secs > 0
    return bool(self._waiting) and has_free and not is_kept

  def _begin(self) -> int:
    """Gives a free slot to a row that waits; returns the slot."""
    row = self._waiting.take(self._running.values())
    slots = range(self.engine.decoder.num_slots)
    slot = next(i for i in slots if i not in self._running)
    self._running[slot] = row
    return slot

  def _read_prompt(self, row: Row, slot: int) -> None:
    # One prompt is read between two calls: other rows wait for no more. Rows of
    # other clients then have steps for as long as the prompt took. So have all
    # rows after a prompt that is scored: it is no text that joins them.
    others = [x for x in self._running.values() if x is not row]
    begin = time.monotonic()
    if row.scores_prompt:
      row.prompt_scores = self.engine.score(row.prompt)
    is_owed = row.scores_prompt or any(x.client != row.client for x in others)
    if row.max_tokens:
      self.engine.decoder.insert(slot, row.prompt)
    else:
      self._end(row, "length")
    if others and is_owed:
      self._owed_secs = time.monotonic() - begin
    self._counters.prompt_tokens += len(row.prompt) - 1

  def _steps(self) -> None:
    rows = {slot: x for slot, x in self._running.items() if x.max_tokens}
    if not rows:
      return
    telling = {i: x for i, x in rows.items() if x.wants_log_probs}
    plain = {i: x for i, x in rows.items() if not x.wants_log_probs}
    # A call for log p has one step. Between two of these calls the other rows
    # have calls of several steps, so that each row has its share of the time.
    decoder = self.engine.decoder
    can_part = bool(plain) and bool(telling)
    is_plain = not telling or (can_part and self._owed_plain_secs > 0)
    begin = time.monotonic()
    # Also in a call that is not theirs, rows have their last token read again,
    # as otherwise zeros would be written over their keys and values.
    found = decoder.steps(
      {slot: _slot_text(row) for slot, row in rows.items()},
      self._count(plain, telling) if is_plain else 1,
      wants_log_probs=not is_plain,
    )
    secs = time.monotonic() - begin
    done = max(map(len, found.values()))
    self._counters.steps += done
    self._owed_secs -= secs
    if is_plain:
      self._step_secs = secs / done
      self._owed_plain_secs -= secs
    elif can_part:
      self._owed_plain_secs = secs * len(plain) / len(telling)
    for slot, row in (plain if is_plain else rows).items():
      self._add(row, found[slot])

  def _add(self, row: Row, found: Sequence[Chosen]) -> None:
    tokens = [each.token for each in found]
    ends = self._eod_id in tokens
    count = tokens.index(self._eod_id) + 1 if ends else len(tokens)
    row.chosen += found[:count]
    self._counters.generated_tokens += count
    if ends:
      self._end(row, "eod")
    elif len(row.chosen) == row.max_tokens:
      self._end(row, "length")
    elif row.is_watched:
      row.changed()

  def _count(self, plain: Mapping[int, Row], others: Mapping[int, Row]) -> int:
    """Returns the number of steps of a call without log p."""
    secs = _MOST_SECS
    if self._waiting and len(self._running) < self.engine.decoder.num_slots:
      # Others wait for free slots: one joins as soon as nothing is owed.
      secs = min(secs, self._owed_secs)
    if others:
      secs = min(secs, self._owed_plain_secs)
    # No row goes beyond its last token, nor the others beyond the cache.
    left = min(x.max_tokens - len(x.chosen) for x in plain.values())
    length = self.engine.decoder.sequence_length
    room = min((length - _position(x) for x in others.values()), default=left)
    return max(1, min(int(secs / max(self._step_secs, 1e-6)), left, room))

  def _sweep(self) -> None:
    # Rows that have ended leave; the caller holds the lock.
    now = time.monotonic()
    for row in [*self._waiting, *self._running.values()]:
      if now > row.deadline:
        self._end(row, "time")
    self._waiting.remove_ended()
    self._running = {i: x for i, x in self._running.items() if not x.ended}
    self._counters.waiting = len(self._waiting)
    self._counters.running = len(self._running)

  def _end(self, row: Row, why: str) -> None:
    row.ended = row.ended or why
    row.changed()


def _position(row: Row) -> int:
  """Returns the position of the last token of a row."""
  return len(row.prompt) + len(row.chosen) - 1


def _slot_text(row: Row) -> SlotText:
  return SlotText(
    token=row.chosen[-1].token if row.chosen else row.prompt[-1],
    position=_position(row),
    place=len(row.chosen),
    key=row.key,
    temperature=row.temperature,
    top_k=row.top_k,
    top_p=row.top_p,
  )
