# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: texts join and leave a batch between its steps."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from palm_mtf.generation.inference.slot_decoder import Chosen, SlotText
from palm_mtf.generation.serving.served_weights import ServedWeights


@dataclasses.dataclass(eq=False, kw_only=True)
class Row:
  """Text to continue, and what was chosen of it so far.

  Attributes:
    prompt: token ids, with what stands before a text.
    max_tokens: tokens to choose at most; 0 if the prompt is only scored.
    key: key of the draws, [2] int32.
    temperature: 0 takes the likeliest token.
    top_k: tokens that may be drawn; None for all.
    top_p: share of the likeliest tokens that may be drawn.
    wants_log_probs: whether to compute log p of the tokens.
    scores_prompt: whether to compute log p of the prompt's tokens too.
    is_watched: whether somebody waits for each token, not only for the last.
    deadline: time.monotonic() at which the row ends, in seconds.
    client: who asked for the row.
    request: which request of the client asked for it.
    changed: called, by the batcher's thread, when there are more tokens.
    prompt_scores: log p of the prompt's tokens, once it is computed.
    chosen: tokens so far, [eod] among them.
    ended: "" while the row continues; then "eod", "length", "time",
      "cancelled" or "failed".
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


# Seconds of the steps of one call, between which no row can join: streams look
# even, nobody waits long, and the work between calls takes a fiftieth of it.
_MOST_SECS = 0.02
# This number of clients may each have as many rows waiting as one client may.
_MOST_CLIENTS = 8
_GAUGES = ("running", "waiting", "checkpoint_step")


class FullError(Exception):
  """No further row may wait."""


class WaitingRows:
  """Rows that wait for slots.

  A free slot goes to the client that has the fewest rows in slots, and of its
  requests to the one that has the fewest. Of several such clients or requests
  it goes to the one whose last turn is longest ago.
  """

  def __init__(self):
    """Begins without rows."""
    # {client: {request: its rows}}, in the order of their last turns.
    self._rows: dict[str, dict[object, collections.deque[Row]]] = {}

  def __iter__(self) -> Iterator[Row]:
    """Iterates over all rows."""
    for requests in self._rows.values():
      for rows in requests.values():
        yield from rows

  def __len__(self) -> int:
    """Returns the number of rows."""
    return sum(map(self.count, self._rows))

  def count(self, client: str) -> int:
    """Returns the number of rows of a client."""
    return sum(map(len, self._rows.get(client, {}).values()))

  def add(self, rows: Sequence[Row]) -> None:
    """Adds the rows of one request."""
    requests = self._rows.setdefault(rows[0].client, {})
    requests[rows[0].request] = collections.deque(rows)

  def take(self, in_slots: Iterable[Row]) -> Row:
    """Removes and returns the row whose turn it is.

    Args:
      in_slots: rows that have slots.
    """
    counts: dict[object, int] = collections.Counter()
    for row in in_slots:
      counts.update([row.client, row.request])
    client = min(self._rows, key=counts.__getitem__)
    requests = self._rows.pop(client)
    request = min(requests, key=counts.__getitem__)
    rows = requests.pop(request)
    row = rows.popleft()
    if rows:
      requests[request] = rows
    if requests:
      self._rows[client] = requests
    return row

  def remove_ended(self) -> None:
    """Removes the rows that have ended."""
    if any(row.ended for row in self):
      for client, requests in list(self._rows.items()):
        kept = {
          request: collections.deque(x for x in rows if not x.ended)
          for request, rows in requests.items()
        }
        self._rows[client] = {x: rows for x, rows in kept.items() if rows}
        if not self._rows[client]:
          del self._rows[client]


@dataclasses.dataclass
class Counters:
  """Counts since the start of a server, and numbers of this moment.

  Attributes:
    requests: {HTTP status: number of answers}.
    prompt_tokens: tokens of prompts that were read.
    generated_tokens: tokens that were chosen.
    steps: decoding steps of the batch.
    cancelled: completions whose client went away, or that a stop string ended.
    request_secs: seconds of all answers together.
    running: completions in a slot.
    waiting: completions that wait for a slot.
    checkpoint_step: training step of the weights that compute.
  """

  requests: collections.Counter = dataclasses.field(
    default_factory=collections.Counter
  )
  prompt_tokens: int = 0
  generated_tokens: int = 0
  steps: int = 0
  cancelled: int = 0
  request_secs: float = 0.0
  running: int = 0
  waiting: int = 0
  checkpoint_step: int = 0

  def page(self) -> str:
    """Returns the counts in Prometheus' text format."""
    lines = ["# TYPE palm_mtf_requests_total counter"]
    lines += [
      f'palm_mtf_requests_total{{code="{code}"}} {count}'
      for code, count in sorted(self.requests.items())
    ]
    for field in dataclasses.fields(self)[1:]:
      is_gauge = field.name in _GAUGES
      name = f"palm_mtf_{field.name}" + ("" if is_gauge else "_total")
      lines += [
        f"# TYPE {name} {'gauge' if is_gauge else 'counter'}",
        f"{name} {getattr(self, field.name)}",
      ]
    return "\n".join(lines) + "\n"


class Batcher:
  """Runs rows in the slots of a decoder, in a thread that calls `run`.

  Attributes:
    engine: weights that compute.
    most_rows: rows of a client that run and wait at most.
    failure: exception that ended `run`, or None.
  """

  def __init__(
    self,
    engine: ServedWeights,
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
    # Seconds of steps that rows are to have before another prompt is read, and
    # that rows without log p are to have before another call for log p.
    self._owed_secs = self._owed_plain_secs = 0.0
    self.failure: BaseException | None = None

  def submit(self, rows: Sequence[Row]) -> None:
    """Lets the rows of one request wait for slots.

    Raises:
      FullError: with these rows, too many rows would wait.
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
    """Ends rows whose client no longer waits for them."""
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
    """Ends all rows and `run` now."""
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
      # Any exception at all: a server whose batch has stopped must stop too.
      self.failure = error
      self.give_up()

  def _num_rows(self) -> int:
    return len(self._waiting) + len(self._running)

  def _turn(self) -> bool:
    """Gives one row a slot, and all rows more tokens; returns False to end."""
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
    # Between two calls only one prompt is read, so that other rows do not wait
    # longer. Then the rows of other clients have steps for as long as the
    # prompt took; after a prompt that was scored, all rows do.
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
    is_mixed = bool(plain) and bool(telling)
    is_plain = not telling or (is_mixed and self._owed_plain_secs > 0)
    begin = time.monotonic()
    # A call reads the last token of every row, also of rows that take nothing
    # from it, because otherwise zeros would overwrite their keys and values.
    found = self.engine.decoder.steps(
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
    elif is_mixed:
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
      # Rows wait for free slots: one gets a slot as soon as no time is owed.
      secs = min(secs, self._owed_secs)
    if others:
      secs = min(secs, self._owed_plain_secs)
    # Rows of this call stop at their last token; `others` stay in the cache.
    left = min(x.max_tokens - len(x.chosen) for x in plain.values())
    length = self.engine.decoder.sequence_length
    room = min((length - _position(x) for x in others.values()), default=left)
    return max(1, min(int(secs / max(self._step_secs, 1e-6)), left, room))

  def _sweep(self) -> None:
    # Removes rows that have ended; the caller holds the lock.
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
