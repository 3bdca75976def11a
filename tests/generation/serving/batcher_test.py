# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows join and leave while others continue, with a decoder that counts up."""

import contextlib
import dataclasses
import threading
import time
import types

import numpy as np
import pytest

from palm_mtf.config import DecodeConfig
from palm_mtf.generation.inference.constraint import ConstraintError
from palm_mtf.generation.inference.slot_decoder import Chosen
from palm_mtf.generation.serving.batcher import (
  Batcher,
  FullError,
  Row,
  take_row,
)
from palm_mtf.generation.serving.completion_request import (
  read_completion_request,
)
from palm_mtf.generation.serving.counters import Counters
from tests.generation.serving.live_server import Weights

EOD, OTHER_END, SLOTS, MOST_WAITING = 1, 1000, 2, 3


class Counting:
  """Chooses the last token plus 1; records its calls.

  Attributes:
    clock: simulated seconds, which the decoder's work advances.
  """

  num_slots, sequence_length = SLOTS, 10**6
  part_tokens = 0  # prompts are read whole
  sends_tokens = False  # before a call returns

  def __init__(self):
    self.clock = 0.0
    self.read, self.counts = [], []
    self.most, self.secs = 1, 0.0  # most steps per call, seconds per step
    self.prompts, self.inserted = {}, []
    # "p" for a prompt, a number for tokens of a part of prompts, "s" for a step
    self.events = []
    self.token_secs = 0.0  # of a part of prompts
    self.insert_secs = self.log_prob_secs = 0.0
    self.asked = []  # (wants_log_probs, number of steps) of each call
    self.masks = []  # {slot: mask} of each call
    self.may_step = threading.Semaphore(10**6)
    self.fails = False

  def insert(self, slot, ids, adapter=0):
    self.clock += self.insert_secs
    self.events.append("p")
    self.prompts[slot] = list(ids)
    self.inserted.append(ids[1])

  def _count_parts(self, parts):
    for part in parts:
      before = self.prompts[part.slot][:-1] if part.first else []
      assert part.first == len(before)
      # A step reads the last token.
      self.prompts[part.slot] = [*before, *part.ids, None]
      yield len(part.ids)

  def read_prompts(self, parts, adapter=0):
    count = sum(self._count_parts(parts))
    assert count <= self.part_tokens
    self.clock += count * self.token_secs
    self.events.append(count)

  def score(self, ids, adapter=0):
    self.clock += self.insert_secs
    self.events.append("p")
    return [Chosen(i, -1.0, {}) for i in ids[1:]]

  def draft(self, slot):
    return ()

  def steps_of(self, texts, count):
    for i in range(count):
      self.may_step.acquire()
      if self.fails:
        raise RuntimeError("out of memory")
      self.events.append("s")
      self.clock += self.secs
      yield {slot: text.token + i for slot, text in texts.items()}

  def steps(self, texts, count, *, wants_log_probs, feed=None):
    for slot, text in texts.items():
      length = len(self.prompts[slot])
      assert text.position == length - 1 + text.place
    masks = {i: x.masks[0] for i, x in texts.items() if x.masks}
    is_single = wants_log_probs or bool(masks)
    count = 1 if is_single else min(count, self.most)
    self.counts.append(count)
    self.clock += self.log_prob_secs * is_single
    self.asked.append((wants_log_probs, count))
    self.masks.append(masks)
    found = {slot: [] for slot in texts}
    for step in self.steps_of(texts, count):
      self.read.append(step)
      for slot, token in step.items():
        found[slot].append(Chosen(token + 1, None, {}))
    return found


class Run:
  """A batcher in a thread, and rows for it."""

  def __init__(self):
    self.decoder, self.counters = Counting(), Counters()
    self.batcher = Batcher(
      Weights(self.decoder),
      self.counters,
      end_ids=(EOD, OTHER_END),
      most_waiting=MOST_WAITING,
    )
    self.thread = threading.Thread(target=self.batcher.run)

  def row(
    self,
    *prompt,
    max_tokens=3,
    secs=60.0,
    scores=False,
    tells=False,
    stream=False,
    client="client",
    constraint=None,
  ):
    asked = {"prompt": [*prompt], "max_tokens": max_tokens, "echo": scores}
    if scores or tells:
      asked["logprobs"] = 1
    asked["stream"] = stream
    return Row(
      prompt=[0, *prompt],
      asked=read_completion_request(
        asked, DecodeConfig(temperature=0.0), sample_tokens=1, seed=0
      ),
      key=np.zeros([2], np.int32),
      deadline=self.decoder.clock + secs,
      client=client,
      changed=lambda: None,
      constraint=constraint,
    )

  def end(self):
    self.batcher.stop()
    self.thread.join(30)
    assert not self.thread.is_alive()

  def serve(self, *rows):
    """Serves rows to their end."""
    self.batcher.submit(rows)
    self.thread.start()
    self.end()


@pytest.fixture
def run(monkeypatch):
  run = Run()
  clock = types.SimpleNamespace(monotonic=lambda: run.decoder.clock)
  monkeypatch.setattr("palm_mtf.generation.serving.batcher.time", clock)
  yield run
  with contextlib.suppress(RuntimeError):  # a thread that was never started
    run.decoder.may_step.release(1000)
    run.end()


def tokens(row):
  return [each.token for each in row.chosen]


def wait_for(row, count):
  while len(row.chosen) < count:
    time.sleep(0.001)


def test_rows_leave_when_they_end_and_others_take_their_slots(run):
  rows = [run.row(10, max_tokens=n) for n in (5, 1, 2)]
  rows.append(run.row(EOD - 2, max_tokens=9))  # [eod] comes second
  run.serve(*rows)
  assert [row.ended for row in rows] == ["length"] * 3 + ["eod"]
  expected = [11, 12, 13, 14, 15], [11], [11, 12], [0, 1]
  assert tuple(map(tokens, rows)) == expected
  # The first row keeps its slot, and the other slot serves the other rows.
  assert all(0 in step for step in run.decoder.read[:5])
  of_other = [step[1] for step in run.decoder.read if 1 in step]
  assert of_other == [10, 10, 11, -1, 0]
  assert (run.counters.running, run.counters.waiting) == (0, 0)
  assert run.counters.generated_tokens == 10


def test_a_row_joins_while_another_continues(run):
  run.decoder.may_step = threading.Semaphore(2)
  first, second = run.row(10, max_tokens=6), run.row(20, max_tokens=2)
  run.batcher.submit([first])
  run.thread.start()
  wait_for(first, 2)
  run.batcher.submit([second])
  run.decoder.may_step.release(100)
  run.end()
  assert tokens(second) == [21, 22] and tokens(first)[-1] == 16
  assert any(len(step) == 2 for step in run.decoder.read)


def test_steps_that_no_row_ends_in_are_one_call(run):
  run.decoder.most = 10**6
  rows = [run.row(10, max_tokens=9), run.row(20, max_tokens=7)]
  run.serve(*rows, run.row(30, max_tokens=2))
  # Before the first call, the time of a step is unknown. The third row gets the
  # slot of the second, and ends together with the first.
  assert run.decoder.counts == [1, 6, 2]
  assert [len(step) for step in run.decoder.read] == [2] * 9
  assert [len(row.chosen) for row in rows] == [9, 7]


def test_a_step_may_choose_several_tokens_of_a_row_up_to_its_end(run):
  """As steps with prompt lookup do."""
  run.decoder.most = 10**6
  limits = []

  def steps(texts, count, *, wants_log_probs, feed=None):
    limits.append({slot: text.limit for slot, text in texts.items()})
    return {
      slot: [
        Chosen(text.token + i, None, {})
        for i in range(1, 1 + min(count * (1 + 3 * slot), text.limit))
      ]
      for slot, text in texts.items()
    }

  run.decoder.steps = steps
  rows = [run.row(10, max_tokens=8), run.row(20, max_tokens=7)]
  run.serve(*rows)
  assert [tokens(x) for x in rows] == [[*range(11, 19)], [*range(21, 28)]]
  assert limits == [{0: 8, 1: 7}, {0: 7, 1: 3}, {0: 4}]
  assert run.counters.steps == 8


def test_tokens_after_the_end_of_a_text_are_dropped(run):
  run.decoder.most = 10**6
  long, short = run.row(50, max_tokens=30), run.row(EOD - 6, max_tokens=30)
  run.serve(long, short)
  assert tokens(short) == [*range(EOD - 5, EOD + 1)] and short.ended == "eod"
  assert tokens(long) == [*range(51, 81)]
  assert run.counters.generated_tokens == 36


def test_the_first_of_several_ends_ends_a_text(run):
  run.decoder.most = 10**6
  row = run.row(OTHER_END - 2, max_tokens=9)
  run.serve(row)
  assert tokens(row) == [OTHER_END - 1, OTHER_END] and row.ended == "eod"


def test_a_call_is_no_longer_than_a_new_row_may_wait(run):
  run.decoder.most, run.decoder.secs = 10**6, 0.006
  row = run.row(10, max_tokens=20)
  run.serve(row)
  assert len(row.chosen) == 20
  assert max(run.decoder.counts) <= 3  # 0.02 s


def test_more_rows_than_may_wait_are_refused_whole(run):
  most = SLOTS + MOST_WAITING
  run.batcher.submit([run.row(1) for _ in range(most - 1)])
  with pytest.raises(FullError):
    run.batcher.submit([run.row(1), run.row(1)])
  run.batcher.submit([run.row(1)])
  with pytest.raises(FullError):
    run.batcher.submit([run.row(1)])
  run.thread.start()
  run.end()
  assert run.counters.generated_tokens == 3 * most


def test_a_cancelled_row_gives_its_slot_and_place_to_others(run):
  run.decoder.may_step = threading.Semaphore(1)
  running = [run.row(10, max_tokens=10**6) for _ in range(SLOTS)]
  waiting = [run.row(50), run.row(60)]
  run.batcher.submit([*running, *waiting])
  run.thread.start()
  wait_for(running[0], 1)
  run.batcher.cancel([*running, waiting[0]])
  run.decoder.may_step.release(1000)
  run.end()
  assert [row.ended for row in running] == ["cancelled"] * SLOTS
  assert len(running[0].chosen) < 10
  assert waiting[0].chosen == []
  assert tokens(waiting[1]) == [61, 62, 63]
  assert run.counters.cancelled == 3


def test_a_row_that_is_only_scored_takes_no_step(run):
  row = run.row(5, 6, max_tokens=0, scores=True)
  run.serve(row)
  assert row.ended == "length"
  assert [x.token for x in row.prompt_scores] == [5, 6]
  assert run.decoder.read == []


def test_a_step_that_fails_ends_all_rows_and_the_batch(run):
  run.decoder.fails = True
  rows = [run.row(1) for _ in range(SLOTS + 1)]
  run.batcher.submit(rows)
  run.thread.start()
  run.thread.join(30)
  assert str(run.batcher.failure) == "out of memory"
  assert {row.ended for row in rows} == {"failed"}
  with pytest.raises(FullError):
    run.batcher.submit([run.row(1)])


def test_a_client_with_many_rows_blocks_no_other_client(run):
  most = SLOTS + MOST_WAITING
  run.batcher.submit([run.row(10 + i, max_tokens=5) for i in range(most)])
  with pytest.raises(FullError):
    run.batcher.submit([run.row(1)])
  for client in range(7):
    run.batcher.submit([run.row(50 + client, client=f"{client}")])
  run.thread.start()
  run.end()
  # The other clients get the first free slots, and the third row of the
  # first client has the next turn.
  order = run.decoder.inserted
  assert len(order) == most + 7
  assert order.index(12) > 7
  assert set(order[:8]) >= {50 + client for client in range(7)}


def test_rows_of_many_clients_are_bounded_too(run):
  most = SLOTS + MOST_WAITING
  with pytest.raises(FullError):
    for client in range(100):
      run.batcher.submit([run.row(1, client=f"{client}") for _ in range(most)])
  assert 4 * most <= len(run.batcher._waiting) <= 8 * most
  run.thread.start()
  run.end()


def test_rows_with_log_p_do_not_slow_the_others_down(run):
  run.decoder.most, run.decoder.log_prob_secs = 10**6, 0.003
  run.decoder.secs = 0.001
  telling = run.row(10, max_tokens=40, tells=True)
  plain = run.row(20, max_tokens=40)
  had = []
  plain.changed = lambda: had.append(len(telling.chosen))
  run.serve(telling, plain)
  assert tokens(telling) == [*range(11, 51)]
  assert tokens(plain) == [*range(21, 61)]
  # A step with log p takes 0.004 s, and then the other row gets as much time:
  # five steps for each step with log p.
  assert had == [pytest.approx(8, abs=1)]


class Recording:
  """A constraint whose masks are the tokens before.

  It becomes too complex after `most` tokens.
  """

  def __init__(self, most=10**6):
    self.accepted, self.most = [], most

  def look_ahead(self, draft):
    if len(self.accepted) == self.most:
      raise ConstraintError
    texts = [[*self.accepted, *draft[:i]] for i in range(len(draft) + 1)]
    return draft, [np.array(x, np.int32) for x in texts]

  def accept(self, token):
    self.accepted.append(token)


@pytest.mark.parametrize("tells", [False, True])
def test_a_row_with_a_constraint_has_a_mask_in_each_of_its_steps(run, tells):
  run.decoder.most, run.decoder.log_prob_secs = 10**6, 0.003
  run.decoder.secs = 0.001
  constraint = Recording()
  bound = run.row(10, max_tokens=40, constraint=constraint, tells=tells)
  plain = run.row(20, max_tokens=40)
  had = []
  plain.changed = lambda: had.append(len(bound.chosen))
  run.serve(bound, plain)
  assert tokens(bound) == constraint.accepted == [*range(11, 51)]
  assert tokens(plain) == [*range(21, 61)]
  # Calls without masks give the other row as much time, as with log p.
  assert had == [pytest.approx(8, abs=1)]
  calls = [x for x in run.decoder.masks if x]
  assert [x[0].tolist() for x in calls] == [
    [*range(11, 11 + i)] for i in range(40)
  ]
  assert all({*x} == {0} for x in calls)
  pairs = zip(run.decoder.asked, run.decoder.masks, strict=True)
  wanted = {asked for asked, masks in pairs if masks}
  assert wanted == {(tells, 1)}


def test_a_constraint_follows_all_tokens_of_a_step_up_to_the_end(run):
  """As steps with prompt lookup choose them."""
  given = []

  def steps(texts, count, *, wants_log_probs, feed=None):
    ((slot, text),) = texts.items()
    given.append((text.draft, [x.tolist() for x in text.masks], text.limit))
    chosen = range(text.token + 1, text.token + 2 + len(text.draft))
    return {slot: [Chosen(i, None, {}) for i in chosen]}

  run.decoder.steps = steps
  run.decoder.draft = lambda _: [EOD - 3, EOD - 2, EOD - 1] if given else []
  constraint = Recording()
  row = run.row(EOD - 6, max_tokens=9, constraint=constraint)
  run.serve(row)
  assert tokens(row) == constraint.accepted == [*range(EOD - 5, EOD + 1)]
  assert row.ended == "eod"


def test_rows_without_constraints_have_no_masks_and_long_calls(run):
  run.decoder.most = 10**6
  run.serve(run.row(10, max_tokens=30), run.row(20, max_tokens=30))
  assert not any(run.decoder.masks)
  assert len(run.decoder.masks) <= 3


def test_a_constraint_that_becomes_too_complex_ends_only_its_row(run):
  bound = run.row(10, max_tokens=9, constraint=Recording(2))
  other = run.row(20, max_tokens=9, constraint=Recording())
  run.serve(bound, other)
  assert (bound.ended, tokens(bound)) == ("complex", [11, 12])
  assert (other.ended, len(other.chosen)) == ("length", 9)
  free = Run()
  row = free.row(10, constraint=Recording(0))
  free.serve(row)
  assert (row.ended, row.chosen) == ("complex", [])


def test_a_call_for_some_rows_stays_within_the_room_of_all(run):
  run.decoder.sequence_length = 50
  run.decoder.most, run.decoder.log_prob_secs = 10**6, 0.02
  telling = run.row(*range(40), max_tokens=10, tells=True)
  plain = run.row(20, max_tokens=45)
  run.serve(telling, plain)
  assert len(telling.chosen) == 10 and len(plain.chosen) == 45


@pytest.mark.parametrize(
  ("scores", "client", "shares"),
  [(True, "client", True), (False, "other", True), (False, "client", False)],
)
def test_long_prompts_leave_half_of_the_time_to_others(
  run, scores, client, shares
):
  run.decoder.most, run.decoder.secs = 10**6, 0.001
  run.decoder.num_slots = 9
  run.decoder.may_step = threading.Semaphore(0)
  run.batcher.submit([run.row(10, max_tokens=100)])
  run.thread.start()
  run.decoder.insert_secs = 0.02
  for i in range(4):
    most = 0 if scores else 100
    run.batcher.submit(
      [run.row(50 + i, max_tokens=most, scores=scores, client=client)]
    )
  run.decoder.may_step.release(10**6)
  run.end()
  # A step takes 0.001 s, and a prompt 0.02.
  _, *between, _ = "".join(run.decoder.events).strip("s").split("p")[1:]
  assert len(between) == 3
  assert all(19 <= len(x) <= 21 if shares else len(x) == 1 for x in between)


def test_new_weights_wait_for_rows_in_slots_and_rows_wait_for_them(run):
  run.decoder.may_step = threading.Semaphore(1)
  old = [run.row(10, max_tokens=5) for _ in range(SLOTS)]
  new, second = run.row(50), Counting()
  run.batcher.submit(old)
  run.thread.start()
  wait_for(old[0], 1)
  ended = []

  def load():
    ended.extend(row.ended for row in old)
    run.batcher.engine.decoder, run.batcher.engine.step = second, 700

  run.batcher.replace_weights(load)
  run.batcher.submit([new])
  run.decoder.may_step.release(1000)
  run.end()
  assert ended == ["length"] * SLOTS
  assert tokens(old[0]) == [11, 12, 13, 14, 15]
  assert second.prompts == {0: [0, 50]} and tokens(new) == [51, 52, 53]
  assert (run.batcher.engine.step, run.counters.checkpoint_step) == (700, 700)


def test_new_weights_are_loaded_at_once_where_nothing_runs(run):
  loaded = threading.Event()
  run.thread.start()
  run.batcher.replace_weights(loaded.set)
  assert loaded.wait(30)
  row = run.row(10)
  run.batcher.submit([row])
  run.end()
  assert tokens(row) == [11, 12, 13]


def test_weights_that_cannot_be_loaded_end_the_batch(run):
  def load():
    raise MemoryError("no room")

  run.batcher.replace_weights(load)
  row = run.row(10)
  run.batcher.submit([row])
  run.thread.start()
  run.thread.join(30)
  assert str(run.batcher.failure) == "no room" and row.ended == "failed"


def test_a_stop_loads_no_new_weights_if_no_row_waits(run):
  run.batcher.stop()
  run.batcher.replace_weights(lambda: pytest.fail("loaded"))
  run.thread.start()
  run.end()
  assert run.batcher.failure is None


@dataclasses.dataclass(eq=False)
class Waiting:
  client: str
  asked: str
  ended: str = ""


def waiting(*requests):
  """Returns rows for triples (client, request, number of rows), in order."""
  return [Waiting(*each) for *each, count in requests for _ in range(count)]


def serve_slot(rows):
  """Returns the requests in the order in which they get the only slot."""
  return "".join(take_row(rows, []).asked for _ in range(len(rows)))


@pytest.mark.parametrize(
  ("requests", "order"),
  [
    # Clients take turns for one slot, and so do requests of a client.
    ([("a", "1", 4), ("b", "2", 2), ("c", "3", 1)], "1231211"),
    ([("a", "1", 5), ("a", "2", 1), ("a", "3", 2)], "12313111"),
    # A client with many requests has no more turns than others.
    ([("a", "1", 1), ("a", "2", 1), ("a", "3", 1), ("b", "4", 3)], "142434"),
  ],
)
def test_clients_and_their_requests_take_turns(requests, order):
  assert serve_slot(waiting(*requests)) == order


def test_a_free_slot_goes_to_the_client_with_the_fewest_slots():
  rows = waiting(("a", "1", 9), ("b", "2", 9))
  in_slots = [Waiting("a", "0") for _ in range(3)]
  for expected in "222":
    in_slots.append(take_row(rows, in_slots))
    assert in_slots[-1].asked == expected
  assert {take_row(rows, in_slots).asked for _ in "12"} == {"1", "2"}


def test_a_new_client_comes_after_waiting_clients_but_before_their_next_turn():
  rows = waiting(("a", "1", 3), ("b", "2", 3))
  first = take_row(rows, [])
  rows.append(Waiting("c", "3"))
  assert first.asked + serve_slot(rows) == "1213212"
