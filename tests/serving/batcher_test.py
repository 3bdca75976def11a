# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""Rows join and leave while others go on, over a decoder that counts up."""

import contextlib
import threading
import time

import numpy as np
import pytest

from palm_mtf.inference.slot_decoder import Chosen
from palm_mtf.serving.batcher import Batcher, FullError, Row
from palm_mtf.serving.counters import Counters

EOD, SLOTS, MOST_WAITING = 1, 2, 3


class Counting:
  """Chooses the token after the last; remembers what was in which slot."""

  num_slots = SLOTS

  def __init__(self):
    self.read, self.counts = [], []
    self.most, self.secs = 1, 0.0  # steps of a call, seconds of a step
    self.prompts = {}
    self.may_step = threading.Semaphore(10**6)
    self.fails = False

  def insert(self, slot, ids):
    self.prompts[slot] = list(ids)

  def steps_of(self, texts, count):
    for i in range(count):
      self.may_step.acquire()
      if self.fails:
        raise RuntimeError("out of memory")
      time.sleep(self.secs)
      yield {slot: text.token + i for slot, text in texts.items()}

  def steps(self, texts, count, *, wants_log_probs):
    for slot, text in texts.items():
      length = len(self.prompts[slot])
      assert text.position == length - 1 + text.place
    count = min(count, self.most)
    self.counts.append(count)
    found = {slot: [] for slot in texts}
    for step in self.steps_of(texts, count):
      self.read.append(step)
      for slot, token in step.items():
        found[slot].append(Chosen(token + 1, None, {}))
    return found


class Run:
  """A batcher in a thread, and rows of it."""

  def __init__(self):
    self.decoder, self.counters = Counting(), Counters()
    self.batcher = Batcher(
      self.decoder,
      lambda ids: [Chosen(i, -1.0, {}) for i in ids[1:]],
      self.counters,
      eod_id=EOD,
      most_waiting=MOST_WAITING,
    )
    self.thread = threading.Thread(target=self.batcher.run)

  def row(self, *prompt, max_tokens=3, secs=60.0, scores=False):
    row = Row(
      prompt=[0, *prompt],
      max_tokens=max_tokens,
      key=np.zeros([2], np.int32),
      temperature=0.0,
      top_k=None,
      top_p=1.0,
      wants_log_probs=False,
      scores_prompt=scores,
      is_watched=False,
      deadline=time.monotonic() + secs,
      changed=lambda: None,
    )
    return row

  def end(self):
    self.batcher.stop()
    self.thread.join(30)
    assert not self.thread.is_alive()


@pytest.fixture
def run():
  run = Run()
  yield run
  with contextlib.suppress(RuntimeError):  # a thread that was never started
    run.decoder.may_step.release(1000)
    run.end()


def tokens(row):
  return [each.token for each in row.chosen]


def test_rows_leave_when_they_end_and_others_take_their_slots(run):
  rows = [run.row(10, max_tokens=n) for n in (5, 1, 2)]
  rows.append(run.row(EOD - 2, max_tokens=9))  # [eod] comes second
  run.batcher.submit(rows)
  run.thread.start()
  run.end()
  assert [row.ended for row in rows] == ["length"] * 3 + ["eod"]
  assert [tokens(row) for row in rows] == [
    [11, 12, 13, 14, 15],
    [11],
    [11, 12],
    [0, 1],
  ]
  # The first row goes on in its slot, and the other slot has the rest.
  assert all(0 in step for step in run.decoder.read[:5])
  assert [step[1] for step in run.decoder.read if 1 in step] == [
    10,
    10,
    11,
    -1,
    0,
  ]
  assert (run.counters.running, run.counters.waiting) == (0, 0)
  assert run.counters.generated_tokens == 10


def test_a_row_joins_while_another_goes_on(run):
  run.decoder.may_step = threading.Semaphore(2)
  first, second = run.row(10, max_tokens=6), run.row(20, max_tokens=2)
  run.batcher.submit([first])
  run.thread.start()
  while len(first.chosen) < 2:
    time.sleep(0.001)
  run.batcher.submit([second])
  run.decoder.may_step.release(100)
  run.end()
  assert tokens(second) == [21, 22] and tokens(first)[-1] == 16
  assert any(len(step) == 2 for step in run.decoder.read)


def test_steps_that_no_row_ends_in_are_one_call(run):
  run.decoder.most = 10**6
  rows = [run.row(10, max_tokens=9), run.row(20, max_tokens=7)]
  run.batcher.submit([*rows, run.row(30, max_tokens=2)])
  run.thread.start()
  run.end()
  # While the second waits for a free slot, the first takes one step alone; the
  # third has the slot of the second, and ends beside the first.
  assert run.decoder.counts[:2] == [1, 7]
  assert sum(run.decoder.counts[2:]) == 2
  assert [len(step) for step in run.decoder.read] == [1] + [2] * 7 + [2, 1]
  assert [len(row.chosen) for row in rows] == [9, 7]


def test_what_comes_behind_the_end_of_a_text_is_not_its_own(run):
  run.decoder.most = 10**6
  long, short = run.row(50, max_tokens=30), run.row(EOD - 6, max_tokens=30)
  run.batcher.submit([long, short])
  run.thread.start()
  run.end()
  assert tokens(short) == [*range(EOD - 5, EOD + 1)] and short.ended == "eod"
  assert tokens(long) == [*range(51, 81)]
  assert run.counters.generated_tokens == 36


def test_a_call_is_as_short_as_a_newcomer_may_wait(run):
  run.decoder.most, run.decoder.secs = 10**6, 0.006
  row = run.row(10, max_tokens=20)
  run.batcher.submit([row])
  run.thread.start()
  run.end()
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
  while not running[0].chosen:
    time.sleep(0.001)
  run.batcher.cancel([*running, waiting[0]])
  run.decoder.may_step.release(1000)
  run.end()
  assert [row.ended for row in running] == ["cancelled"] * SLOTS
  assert len(running[0].chosen) < 10
  assert waiting[0].chosen == []
  assert tokens(waiting[1]) == [61, 62, 63]
  assert run.counters.cancelled == 3


def test_a_row_ends_when_its_time_is_over_waiting_or_not(run):
  run.decoder.may_step = threading.Semaphore(3)
  late = [run.row(10, max_tokens=10**6, secs=0.2) for _ in range(SLOTS + 1)]
  run.batcher.submit(late)
  run.thread.start()
  time.sleep(0.3)
  run.decoder.may_step.release(1000)
  run.end()
  assert [row.ended for row in late] == ["time"] * 3
  assert 0 < len(late[0].chosen) < 10 and late[-1].chosen == []


def test_a_row_that_is_scored_alone_takes_no_step(run):
  row = run.row(5, 6, max_tokens=0, scores=True)
  run.batcher.submit([row])
  run.thread.start()
  run.end()
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


def test_giving_up_ends_rows_that_would_go_on(run):
  rows = [run.row(1, max_tokens=10**6) for _ in range(SLOTS + 1)]
  run.batcher.submit(rows)
  run.thread.start()
  run.batcher.give_up()
  run.thread.join(30)
  assert not run.thread.is_alive()
  assert {row.ended for row in rows} == {"failed"}
