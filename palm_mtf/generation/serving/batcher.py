# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Continuous batching: completions join and leave a running batch."""

import collections
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

import numpy as np

from palm_mtf.generation.inference.constraint import Constraint, ConstraintError
from palm_mtf.generation.inference.slot_decoder import (
  Chosen,
  PromptPart,
  SlotText,
  last_to_read,
)
from palm_mtf.generation.inference.token_feed import TokenFeed
from palm_mtf.generation.serving.completion_request import CompletionRequest
from palm_mtf.generation.serving.counters import Counters
from palm_mtf.generation.serving.served_weights import ServedWeights


@dataclasses.dataclass(eq=False, kw_only=True)
class Row:
  """A completion that a request asks for: prompt, and new tokens so far."""

  prompt: Sequence[int]  # token ids, with the start token if there is one
  num_start: int = 1  # start tokens in `prompt`, 0 or 1, which have no text
  asked: CompletionRequest  # the request, which may ask for several rows
  key: np.ndarray  # random key for drawing the tokens, [2] int32
  # Value of time.monotonic(), in seconds, at which the row ends unfinished.
  deadline: float
  client: str  # sender of the request, from Access.find_client; for fairness
  # Wakes the server, from any thread: the row has ended (unless by `cancel`) or
  # has new tokens that a stream or the search for stop strings needs.
  changed: Callable[[], None]
  # Says which tokens the row may have; None for any. A decoder call for such a
  # row runs one step, which may choose several tokens.
  constraint: Constraint | None = None
  # Prompt tokens after the first, with log p; () if not computed, or not yet.
  prompt_scores: Sequence[Chosen] = ()
  # New tokens so far, including the end token.
  chosen: list[Chosen] = dataclasses.field(default_factory=list)
  # "" while the row continues; then "eod" (end token), "length" (max_tokens),
  # "time" (deadline), "complex" (the constraint), "cancelled" or "failed" (the
  # batcher gave up).
  ended: str = ""

  @property
  def scores_prompt(self) -> bool:
    """Whether the answer repeats the prompt and lists log p of its tokens."""
    asked = self.asked
    return asked.wants_log_probs and asked.echo and len(self.prompt) > 1

  @property
  def is_unscored(self) -> bool:
    """Whether the prompt has to be scored before it is read."""
    return self.scores_prompt and not self.prompt_scores

  @property
  def needs_single_steps(self) -> bool:
    """Whether a decoder call that gives the row a token runs only one step."""
    return self.asked.wants_log_probs or self.constraint is not None

  @property
  def is_watched(self) -> bool:
    """Whether the server needs each token as soon as it is chosen."""
    return self.asked.stream or bool(self.asked.stop)


# Maximum seconds of a decoder call, which runs several steps. Calls are short,
# because rows join only between calls, but 50 times as long as the work between
# two calls, so that this work costs little.
_MOST_SECS = 0.02
# The same for a call with a feed. It may be longer, because it ends early when
# a row comes or ends.
_MOST_FED_SECS = 0.25
# Minimum tokens of prompts that are read between two decoder calls, if a slot
# has text: fewer take as long, because all weights are read for them.
_FEWEST_TOKENS = 16
# Maximum tokens of short prompts.
_SHORT_PROMPT = 256
# Maximum seconds of short prompts that are read between two decoder calls. Long
# prompts get _MOST_SECS, because rows with tokens wait for more parts of them.
_MOST_SHORT_SECS = 0.06
# While no row has a token yet, steps wait for short prompts, but at most until
# so many tokens are read: rows that come together begin together, because rows
# with tokens would wait for each further part of the other prompts.
_MOST_TOKENS_AHEAD = 2048
# The queue, which must not grow without limit, has room for one row per slot,
# plus `most_waiting` rows for each of this many clients.
_MOST_CLIENTS = 8


class FullError(Exception):
  """The queue has no room for a request's rows; the client may retry."""


def take_row(waiting: list[Row], in_slots: Iterable[Row]) -> Row:
  """Removes and returns the next of the waiting rows, for a free slot.

  A slot is a row of the decoding batch. A free slot goes to the client with the
  fewest rows in slots and, among the client's requests, to the request with the
  fewest rows in slots. In a tie, the client or request that has waited longest
  gets the slot.

  Args:
    waiting: rows without a slot, those of the client, and then of the request,
      that has waited longest (since its last slot, or since its arrival) first.
    in_slots: rows that have a slot.
  """
  counts: dict[object, int] = collections.Counter()
  for row in in_slots:
    counts.update([row.client, row.asked])
  client = min(waiting, key=lambda x: counts[x.client]).client
  of_client = [x for x in waiting if x.client == client]
  row = min(of_client, key=lambda x: counts[x.asked])
  waiting.remove(row)
  # The client and the request got a slot last. So move the client's rows to the
  # end, and of these the request's rows to the very end.
  waiting.sort(key=lambda x: (x.client == client, x.asked is row.asked))
  return row


class Batcher:
  """Decodes completions (rows) in one batch, in the thread that calls `run`."""

  def __init__(
    self,
    engine: ServedWeights,
    counters: Counters,
    *,
    end_ids: Collection[int],
    most_waiting: int,
  ):
    """Begins without rows.

    A token of `end_ids` ends a row. A client may have one row per slot, and
    `most_waiting` more.
    """
    self.engine = engine
    self._counters = counters
    self._counters.checkpoint_step = engine.step
    self._end_ids = end_ids
    self._most_waiting = most_waiting
    # Maximum number of rows per client, running and waiting together.
    self.most_rows = engine.decoder.num_slots + most_waiting
    self._changed = threading.Condition()
    self._waiting: list[Row] = []
    self._running: dict[int, Row] = {}
    # {slot: how many tokens of its prompt are read}, first the oldest prompt of
    # the client that has waited longest.
    self._unread: dict[int, int] = {}
    self._is_first_next = False
    self._tokens_ahead = 0  # tokens of prompts read since the last step
    # Rows for which a step waits: those that came before the first of them was
    # read; None if none is read.
    self._together: Collection[Row] | None = None
    self._token_secs = 0.0  # measured seconds per token of a prompt
    self._feed = TokenFeed()
    self._fed: Mapping[int, Row] = {}  # rows of the call that uses the feed
    self._appending = threading.Lock()  # of `_fed` and its rows' tokens
    self._load: Callable[[], None] | None = None
    self._is_stopping = False
    # Measured seconds per step of calls that may run several steps.
    self._step_secs = _MOST_SECS
    # Seconds of decoding steps that must pass before the next prompt is read,
    # because prompts must not stop the rows in slots. The second value: seconds
    # of such calls before the next call with a single step, for this reason.
    self._owed_secs = self._owed_plain_secs = 0.0
    self.failure: BaseException | None = None  # error that ended `run`

  def submit(self, rows: Sequence[Row]) -> None:
    """Queues the rows of one request.

    Raises FullError if clients have too many rows, or the batcher stops.
    """
    client = rows[0].client
    with self._changed:
      queued = [*self._waiting, *self._running.values()]
      of_client = sum(x.client == client for x in queued) + len(rows)
      of_all = len(self._waiting) + len(rows)
      if (
        of_client > self.most_rows
        or of_all > self.most_rows + (_MOST_CLIENTS - 1) * self._most_waiting
        or self._is_stopping
      ):
        raise FullError
      self._waiting += rows
      if len(self._running) < self.engine.decoder.num_slots:
        self._feed.end_call()
      self._changed.notify()

  def replace_weights(self, load: Callable[[], None]) -> None:
    """Calls `load` in the batcher's thread as soon as all slots are free.

    `load` replaces the weights of the engine. Until then, no further row gets a
    slot, so that the same weights choose all tokens of a row.
    """
    with self._changed:
      self._load = load
      self._changed.notify()

  def cancel(self, rows: Sequence[Row]) -> None:
    """Ends those of `rows` that have not ended yet; this frees their slots."""
    with self._changed:
      for row in rows:
        if not row.ended:
          row.ended = "cancelled"
          self._counters.cancelled += 1
          self._feed.end_call()
      self._changed.notify()

  @property
  def feed(self) -> int:
    """Descriptor that can be read when `take_tokens` should be called."""
    return self._feed.fileno()

  def take_tokens(self) -> None:
    """Gives rows the tokens of the current decoder call; for any thread."""
    with self._appending:
      found: dict[int, list[tuple[int, int]]] = {}
      for slot, place, token in self._feed.read():
        found.setdefault(slot, []).append((place, token))
      for slot, tokens in found.items():
        # Tokens that the previous call sent as it ended may have no row.
        if row := self._fed.get(slot):
          chosen = [Chosen(token, None, {}) for _, token in tokens]
          self._append(row, chosen, tokens[0][0])
          if row.ended:
            self._feed.end_call()

  def stop(self) -> None:
    """Refuses further rows, and makes `run` return when no row is left."""
    with self._changed:
      self._is_stopping = True
      self._changed.notify()

  def give_up(self) -> None:
    """Ends all rows now as "failed", so that `run` returns."""
    with self._changed:
      self._is_stopping = True
      for row in [*self._waiting, *self._running.values()]:
        self._end(row, "failed")
      self._changed.notify()

  def run(self) -> None:
    """Runs rows until `stop` or `give_up`, or until an error sets `failure`."""
    try:
      while self._take_turn():
        pass
    except BaseException as error:
      # Catch every exception, because a server must stop if its batcher stops.
      self.failure = error
      self.give_up()

  def _take_turn(self) -> bool:
    # Replaces the weights or gives a slot to a waiting row, if possible; then
    # calls the decoder once. Returns False if the batcher has stopped.
    load = None
    with self._changed:
      self._remove_ended()
      while not (self._waiting or self._running):
        if self._is_stopping:
          return False
        if self._load:
          break
        self._changed.wait()
      self._feed.begin_call()
      if self._load and not self._running:
        load, self._load = self._load, None
      while self._may_begin():
        row = take_row(self._waiting, self._running.values())
        slots = range(self.engine.decoder.num_slots)
        slot = next(i for i in slots if i not in self._running)
        self._running[slot], self._unread[slot] = row, 0
    if load:
      load()
      self._counters.checkpoint_step = self.engine.step
    if self._unread and self._owed_secs <= 0:
      self._read_prompts()
    if self._running and not self._reads_on():
      self._run_steps()
    return True

  def _may_begin(self) -> bool:
    # Without a text whose prompt is read, nothing is owed.
    if len(self._running) == len(self._unread):
      self._owed_secs = 0.0
    has_free = len(self._running) < self.engine.decoder.num_slots
    is_kept = self._load is not None
    if not self.engine.decoder.part_tokens:
      # A prompt that is read whole is read as soon as it has a slot.
      is_kept |= bool(self._unread) or self._owed_secs > 0
    return bool(self._waiting) and has_free and not is_kept

  def _read_prompts(self) -> None:
    # Reads a part of prompts, or one prompt. If another client has a row with
    # tokens, or if the prompt is scored, which is slow, the batcher does not
    # read on before decoding has taken as much time; or less, if more clients
    # wait for their prompts than for the decoding.
    others = [x for i, x in self._running.items() if i not in self._unread]
    begun = [x for x in others if x.chosen]
    begin, slot = time.monotonic(), next(iter(self._unread))
    row, decoder = self._running[slot], self.engine.decoder
    is_scored, adapter = row.is_unscored, row.asked.adapter_number
    if is_scored:
      row.prompt_scores = self.engine.score(row.prompt, adapter)
    parts = [PromptPart(slot, row.prompt, 0)]
    if not row.asked.max_tokens:
      self._end(row, "length")
    elif decoder.part_tokens:
      parts = self._take_part(bool(begun))
      start = time.monotonic()
      decoder.read_prompts(parts, adapter)
      tokens = max(_FEWEST_TOKENS, sum(len(x.ids) for x in parts))
      self._token_secs = (time.monotonic() - start) / tokens
    else:
      decoder.insert(slot, row.prompt, adapter)
    clients = {self._running[x.slot].client for x in parts}
    if is_scored or any({x.client} != clients for x in begun):
      own = {x.client for x in (others if is_scored else begun)}
      reading = {self._running[i].client for i in self._unread}
      share = min(1.0, len(own) / len(reading))
      self._owed_secs = (time.monotonic() - begin) * share
    self._tokens_ahead += sum(len(x.ids) for x in parts)
    if parts[0].slot == slot:  # then another client comes first
      order = sorted(
        self._unread, key=lambda i: self._running[i].client == row.client
      )
      self._unread = {i: self._unread[i] for i in order}
    for part in parts:
      self._unread[part.slot] += len(part.ids)
      if self._count_unread(part.slot) <= 0:
        del self._unread[part.slot]
        row = self._running[part.slot]
        self._counters.prompt_tokens += len(row.prompt) - row.num_start

  def _reads_on(self) -> bool:
    # Returns whether steps wait for a further prompt. Once a row has tokens,
    # none waits. A client's rows wait for rows of another client only as long
    # as that client has no more of them.
    read = [x for i, x in self._running.items() if i not in self._unread]
    if not read or any(x.chosen for x in read) or self._owed_secs > 0:
      return False
    unread = [self._running[i] for i in self._unread]
    if self._may_begin():
      unread += self._waiting
    if self._together is None:
      self._together = unread
    counts = collections.Counter(x.client for x in read)
    fewest = min(counts.values())
    return self._tokens_ahead < _MOST_TOKENS_AHEAD and any(
      len(x.prompt) <= _SHORT_PROMPT
      and counts[x.client] <= fewest
      and x in self._together
      and not x.is_unscored
      for x in unread
    )

  def _take_part(self, has_begun: bool) -> list[PromptPart]:
    # Returns parts to read, of the first prompt and those with its adapter. In
    # turns, the first and the shortest ones come first: short prompts need not
    # wait for a long one, which gets at least half of the tokens of its client.
    decoder, first = self.engine.decoder, next(iter(self._unread))
    adapter = self._running[first].asked.adapter_number
    order = [first]
    for slot in self._unread:
      row = self._running[slot]
      is_like = row.asked.adapter_number == adapter and row.asked.max_tokens
      if slot != first and is_like and not row.is_unscored:
        order.append(slot)
    if not self._is_first_next:
      order.sort(key=self._count_unread)
    self._is_first_next = not self._is_first_next
    left = {is_short: decoder.part_tokens for is_short in (True, False)}
    if has_begun and self._token_secs:
      # Rows with tokens wait for the part.
      for is_short, secs in ((True, _MOST_SHORT_SECS), (False, _MOST_SECS)):
        fitting = max(_FEWEST_TOKENS, int(secs / self._token_secs))
        left[is_short] = min(left[is_short], fitting)
    parts = []
    for slot in order:
      prompt, at = self._running[slot].prompt, self._unread[slot]
      count = left[len(prompt) <= _SHORT_PROMPT]
      ids = prompt[at : at + max(0, min(count, self._count_unread(slot)))]
      parts += [PromptPart(slot, ids, at)] if ids else []
      left = {x: y - len(ids) for x, y in left.items()}
    return parts

  def _count_unread(self, slot: int) -> int:
    return last_to_read(self._running[slot].prompt) - self._unread[slot]

  def _run_steps(self) -> None:
    rows = {
      i: x
      for i, x in self._running.items()
      if x.asked.max_tokens and i not in self._unread
    }
    if rows or not self._unread:  # no step waits for prompts any more
      self._tokens_ahead, self._together = 0, None
    if not rows:
      return
    single = {i: x for i, x in rows.items() if x.needs_single_steps}
    plain = {i: x for i, x in rows.items() if i not in single}
    # A decoder call with log p runs only one step, because it keeps the logits
    # of one step; a call with masks does too, because masks depend on tokens.
    # Between two such calls, the other rows get calls of several steps, so that
    # all rows get equal time.
    is_mixed = bool(plain) and bool(single)
    is_plain = not single or (is_mixed and self._owed_plain_secs > 0)
    is_watched = is_plain and any(x.is_watched for x in plain.values())
    is_fed = is_watched and self.engine.decoder.sends_tokens
    count = 1
    if is_plain and (is_fed or not is_watched):
      count = self._count_steps(plain, single, is_fed=is_fed)
    begin = time.monotonic()
    ahead = {} if is_plain else self._look_ahead(single)
    rows = {i: x for i, x in rows.items() if x.ended != "complex"}
    if not rows:
      return
    taking = plain if is_plain else rows
    before = {i: len(x.chosen) for i, x in taking.items()}
    if is_fed:
      with self._appending:
        self._fed = taking
    # Feed all rows, even those that take no token from this call: for a missing
    # row, the decoder feeds zeros, which may overwrite its keys and values.
    found = self.engine.decoder.steps(
      {
        i: _make_slot_text(x, i in taking, *ahead.get(i, ()))
        for i, x in rows.items()
      },
      count,
      wants_log_probs=not is_plain
      and any(x.asked.wants_log_probs for x in single.values()),
      feed=self._feed if is_fed else None,
    )
    secs = time.monotonic() - begin
    # With prompt lookup, a step may choose several tokens of a row.
    done = min(count, max(map(len, found.values())))
    self._counters.steps += done
    self._owed_secs -= secs
    if is_plain:
      self._step_secs = secs / done
      self._owed_plain_secs -= secs
    elif is_mixed:
      self._owed_plain_secs = secs * len(plain) / len(single)
    with self._appending:
      self._fed = {}
      self._feed.drop_tokens()
      for slot, row in taking.items():
        self._append(row, found[slot], before[slot])

  def _look_ahead(self, rows: Mapping[int, Row]) -> dict[int, tuple]:
    # Returns `Constraint.look_ahead` of rows with a constraint. Ends rows whose
    # constraint has become too complex.
    found = {}
    for slot, row in rows.items():
      try:
        if row.constraint:
          draft = self.engine.decoder.draft(slot)
          found[slot] = row.constraint.look_ahead(draft)
      except ConstraintError:
        self._end(row, "complex")
    return found

  def _append(self, row: Row, found: Sequence[Chosen], first: int) -> None:
    # Adds tokens of a call to a row, but none twice, and none after its end.
    # The first of `found` is the row's token number `first`, from 0.
    found = found[len(row.chosen) - first :]
    if row.ended or not found:
      return
    tokens = [each.token for each in found]
    ends = [i for i, token in enumerate(tokens, 1) if token in self._end_ids]
    count = ends[0] if ends else len(tokens)
    row.chosen += found[:count]
    if row.constraint:
      for token in tokens[:count]:
        row.constraint.accept(token)
    self._counters.generated_tokens += count
    if ends:
      self._end(row, "eod")
    elif len(row.chosen) == row.asked.max_tokens:
      self._end(row, "length")
    elif row.is_watched:
      # Wake the event loop only if the text is needed before the row ends,
      # because waking the loop takes longer than a step of a small model.
      row.changed()

  def _count_steps(
    self, plain: Mapping[int, Row], others: Mapping[int, Row], *, is_fed: bool
  ) -> int:
    # Returns the number of steps of a decoder call without log p or masks, for
    # the rows `plain`. The rows `others` need log p or masks.
    secs = _MOST_FED_SECS if is_fed else _MOST_SECS
    has_free = len(self._running) < self.engine.decoder.num_slots
    if self._unread or (self._waiting and has_free):
      # A prompt can be read, so decode only for the time that is due before.
      secs = min(secs, self._owed_secs)
    if others:
      secs = min(secs, self._owed_plain_secs)
    # No `plain` row may exceed its max_tokens. The call also writes keys and
    # values of `others`, and must not write past the end of their cache.
    left = min(x.asked.max_tokens - len(x.chosen) for x in plain.values())
    length = self.engine.decoder.sequence_length
    room = min(
      (length - _find_position(x) for x in others.values()), default=left
    )
    return max(1, min(int(secs / max(self._step_secs, 1e-6)), left, room))

  def _remove_ended(self) -> None:
    # The caller holds the lock `_changed`.
    now = time.monotonic()
    for row in [*self._waiting, *self._running.values()]:
      if now > row.deadline:
        self._end(row, "time")
    self._waiting = [x for x in self._waiting if not x.ended]
    self._running = {i: x for i, x in self._running.items() if not x.ended}
    self._unread = {i: x for i, x in self._unread.items() if i in self._running}
    self._counters.waiting = len(self._waiting)
    self._counters.running = len(self._running)

  def _end(self, row: Row, why: str) -> None:
    row.ended = row.ended or why
    row.changed()


def _find_position(row: Row) -> int:
  # Returns the position of the row's last token, from 0 for the first token.
  return len(row.prompt) + len(row.chosen) - 1


def _make_slot_text(
  row: Row,
  takes_tokens: bool,
  draft: Sequence[int] = (),
  masks: Sequence[np.ndarray] = (),
) -> SlotText:
  return SlotText(
    token=row.chosen[-1].token if row.chosen else row.prompt[-1],
    position=_find_position(row),
    place=len(row.chosen),
    key=row.key,
    temperature=row.asked.temperature,
    top_k=row.asked.top_k,
    top_p=row.asked.top_p,
    limit=(row.asked.max_tokens - len(row.chosen)) * takes_tokens,
    masks=masks,
    adapter=row.asked.adapter_number,
    draft=draft,
  )
