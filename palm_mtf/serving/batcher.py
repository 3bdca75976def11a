# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: texts join and leave a batch between its steps."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from palm_mtf.inference.slot_decoder import Chosen, SlotText
from palm_mtf.serving.counters import Counters


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
  changed: Callable[[], None]
  prompt_scores: Sequence[Chosen] = ()
  chosen: list[Chosen] = dataclasses.field(default_factory=list)
  ended: str = ""


# Seconds that steps may take together before others can join: streams look even
# and nobody waits, and what comes between two calls is a fiftieth of them.
_MOST_SECS = 0.02


class FullError(Exception):
  """As many rows wait as may."""


class Decoder(Protocol):
  """What a batcher needs of SlotDecoder."""

  num_slots: int

  def insert(self, slot: int, ids: Sequence[int]) -> None:
    """Prefills a slot."""

  def steps(
    self, texts: dict[int, SlotText], count: int, *, wants_log_probs: bool
  ) -> dict[int, list[Chosen]]:
    """Chooses up to `count` next tokens of each text."""


class Batcher:
  """Runs rows in the slots of a decoder, in a thread that calls `run`.

  Attributes:
    most_rows: rows that run and wait at most.
    failure: exception that ended `run`, or None.
  """

  def __init__(
    self,
    decoder: Decoder,
    score: Callable[[Sequence[int]], Sequence[Chosen]],
    counters: Counters,
    *,
    eod_id: int,
    most_waiting: int,
  ):
    """Readies a batch without rows.

    Args:
      decoder: decoder of the slots.
      score: returns log p of the tokens of a prompt, but the first.
      counters: counts to keep.
      eod_id: token that ends a text.
      most_waiting: rows that may wait for a slot.
    """
    self._decoder, self._score = decoder, score
    self._counters = counters
    self._eod_id = eod_id
    self.most_rows = decoder.num_slots + most_waiting
    self._changed = threading.Condition()
    self._waiting: collections.deque[Row] = collections.deque()
    self._running: dict[int, Row] = {}
    self._is_stopping = False
    self._most_steps = 1
    self.failure: BaseException | None = None

  def submit(self, rows: Sequence[Row]) -> None:
    """Lets rows wait for slots, in order.

    Raises:
      FullError: the rows are too many beside those that are there.
    """
    with self._changed:
      if self._num_rows() + len(rows) > self.most_rows or self._is_stopping:
        raise FullError
      self._waiting.extend(rows)
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
    with self._changed:
      self._sweep()
      while not self._num_rows():
        if self._is_stopping:
          return False
        self._changed.wait()
      row, slot = self._next()
    # One prompt is read between two calls: other rows wait for no more.
    if row:
      if row.scores_prompt:
        row.prompt_scores = self._score(row.prompt)
      if row.max_tokens:
        self._decoder.insert(slot, row.prompt)
      else:
        self._end(row, "length")
      self._counters.prompt_tokens += len(row.prompt) - 1
    if self._running:
      self._steps()
    return True

  def _next(self) -> tuple[Row | None, int]:
    free = set(range(self._decoder.num_slots)) - {*self._running}
    if not free or not self._waiting:
      return None, -1
    slot = min(free)
    row = self._running[slot] = self._waiting.popleft()
    return row, slot

  def _steps(self) -> None:
    running = {
      slot: row for slot, row in self._running.items() if row.max_tokens
    }
    if not running:
      return
    texts = {}
    for slot, row in running.items():
      last = row.chosen[-1].token if row.chosen else row.prompt[-1]
      texts[slot] = SlotText(
        token=last,
        position=len(row.prompt) + len(row.chosen) - 1,
        place=len(row.chosen),
        key=row.key,
        temperature=row.temperature,
        top_k=row.top_k,
        top_p=row.top_p,
      )
    wants_log_probs = any(row.wants_log_probs for row in running.values())
    begin = time.monotonic()
    found = self._decoder.steps(
      texts, self._count(running.values()), wants_log_probs=wants_log_probs
    )
    done = max(map(len, found.values()))
    secs = (time.monotonic() - begin) / done
    self._most_steps = max(1, int(_MOST_SECS / max(secs, 1e-6)))
    self._counters.steps += done
    for slot, row in running.items():
      tokens = [each.token for each in found[slot]]
      ends = self._eod_id in tokens
      count = tokens.index(self._eod_id) + 1 if ends else len(tokens)
      row.chosen += found[slot][:count]
      self._counters.generated_tokens += count
      if ends:
        self._end(row, "eod")
      elif len(row.chosen) == row.max_tokens:
        self._end(row, "length")
      elif row.is_watched:
        row.changed()

  def _count(self, rows: Iterable[Row]) -> int:
    # No row goes beyond its last token. While others wait for free slots, one
    # joins behind each step.
    if self._waiting and len(self._running) < self._decoder.num_slots:
      return 1
    left = min(row.max_tokens - len(row.chosen) for row in rows)
    return min(self._most_steps, left)

  def _sweep(self) -> None:
    # Rows that have ended leave; the caller holds the lock.
    now = time.monotonic()
    for row in [*self._waiting, *self._running.values()]:
      if now > row.deadline:
        self._end(row, "time")
    self._waiting = collections.deque(x for x in self._waiting if not x.ended)
    self._running = {i: x for i, x in self._running.items() if not x.ended}
    self._counters.waiting = len(self._waiting)
    self._counters.running = len(self._running)

  def _end(self, row: Row, why: str) -> None:
    row.ended = row.ended or why
    row.changed()
