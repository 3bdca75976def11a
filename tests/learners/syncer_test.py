# Copyright 2026 The palm_mtf authors.
# SPDX-License-Identifier: Apache-2.0
"""The syncer merges as Decoupled DiLoCo says, with a clock of the test.

No task is lost or merged twice, whichever learners leave, are slow or join.
"""

import collections
import re

import numpy as np
import pytest

from palm_mtf.config import ExchangeConfig
from palm_mtf.errors import UserError
from palm_mtf.learners.syncer import DONE, WAIT, OuterParameters, Syncer

NAMES = [
  "embedding",
  "layer_000/mlp/in",
  "layer_001/mlp/in",
  "final_norm/scale",
]
FRAGMENTS = [[NAMES[0], NAMES[1]], [NAMES[2], NAMES[3]]]
SHAPE = (3, 2)
TOKENS = 100


def arrays(seed, names=NAMES):
  rng = np.random.default_rng(seed)
  return {x: rng.normal(size=SHAPE).astype(np.float32) for x in names}


def make(fragments=FRAGMENTS, *, quorum=2, state=None, events=None, **settings):
  exchange = ExchangeConfig(
    exchange="diloco", outer_steps=4, fragments=len(fragments)
  )
  outer = OuterParameters(arrays(0), fragments, exchange)
  given = {"num_tasks": 100, "grace_secs": 5.0, "lost_secs": 100.0, **settings}
  note = (lambda x: None) if events is None else events.append
  return Syncer(outer, quorum=quorum, state=state, note=note, **given)


def send(syncer, member, now, *, seed=1, tokens=TOKENS):
  """Ends the work of a learner; returns how far its fragments moved."""
  number = syncer.next(member, now).number
  work = syncer.find_work(member, number)
  names = [x for i in work.sends for x in syncer.outer.fragments[i]]
  moved = arrays(seed, names)
  syncer.contribute(member, number, moved, tokens, now)
  return moved


ONE = [NAMES]


def test_merges_weight_by_tokens_and_keep_nesterovs_momentum_per_fragment():
  """Eight merges of two fragments, against float64 (arXiv:2604.21428)."""
  syncer = make(grace_secs=0.0)
  p = {x: y.astype(np.float64) for x, y in arrays(0).items()}
  b = {x: np.zeros(SHAPE) for x in NAMES}
  since = collections.Counter()  # tokens, by learner and fragment
  for member in "abc":
    syncer.join(member, 0.0)
  for turn in range(8):
    fragment, sent = turn % 2, {}
    for i, member in enumerate("abc"):
      tokens = 10 * (i + 1) + turn
      sent[member] = send(
        syncer, member, float(turn), seed=10 * turn + i, tokens=tokens
      )
      for each in range(2):
        since[member, each] += tokens
    (merge,) = syncer.tick(float(turn))
    assert (merge["fragment"], merge["learners"]) == (fragment, [0, 1, 2])
    total = sum(since[x, fragment] for x in "abc")
    for name in FRAGMENTS[fragment]:
      delta = -sum(
        since[x, fragment] / total * sent[x][name].astype(np.float64)
        for x in "abc"
      )
      b[name] = 0.9 * b[name] + delta
      p[name] = p[name] - 0.7 * (delta + 0.9 * b[name])
    for member in "abc":
      since[member, fragment] = 0
  # A learner's tokens count once, when the first fragment is merged.
  assert syncer.figures()["a"] == (8, 0, sum(10 + x for x in range(7)))
  for name in NAMES:
    np.testing.assert_allclose(
      syncer.outer.parameters[name], p[name], 1e-5, 1e-6, err_msg=name
    )


def test_a_merge_needs_the_quorum_and_waits_for_the_grace_window():
  syncer = make(ONE)
  for member in "abc":
    syncer.join(member, 0.0)
    syncer.next(member, 0.0)
  send(syncer, "a", 1.0)
  assert not syncer.tick(8.0)  # one of a quorum of two
  send(syncer, "b", 9.0)
  assert not syncer.tick(13.9)
  (merge,) = syncer.tick(14.0)
  assert merge["learners"] == [0, 1]
  # The slow learner's work is part of the next merge, which needs no grace
  # once all have sent.
  send(syncer, "c", 15.0)
  send(syncer, "a", 15.0)
  assert not syncer.tick(15.5)
  send(syncer, "b", 16.0)
  (merge,) = syncer.tick(16.0)
  assert merge["learners"] == [0, 1, 2]
  assert syncer.figures()["c"] == (2, 0, TOKENS)
  assert syncer.num_done == 5


def test_a_fast_learner_waits_for_the_merge_or_overlaps_it_with_one_task():
  for overlaps in (False, True):
    syncer = make(ONE, overlaps=overlaps)
    for member in "ab":
      syncer.join(member, 0.0)
      syncer.next(member, 0.0)
    send(syncer, "a", 1.0)
    if overlaps:
      send(syncer, "a", 2.0)
    assert syncer.next("a", 3.0) == WAIT
    send(syncer, "b", 4.0)
    assert syncer.next("a", 4.0) == WAIT  # for the merge that is due
    (merge,) = syncer.tick(4.0)
    assert merge["learners"] == [0, 1]
    assert syncer.num_done == (3 if overlaps else 2)
    assert syncer.next("a", 5.0).takes == (0,)


def test_the_task_of_a_lost_learner_goes_to_another_and_its_result_is_refused():
  """What it has sent before is merged."""
  syncer = make(ONE, lost_secs=10.0)
  for member in "ab":
    syncer.join(member, 0.0)
  send(syncer, "a", 1.0)
  send(syncer, "b", 1.0)
  assert len(syncer.tick(1.0)) == 1
  lost = syncer.next("b", 1.0)
  # Its slowest task took no time, so it is lost after 10 seconds.
  send(syncer, "a", 2.0)
  syncer.tick(11.5)
  assert syncer.members == ["a"]
  with pytest.raises(UserError, match="b: does not take part, or was too slow"):
    syncer.contribute("b", lost.number, {}, TOKENS, 12.0)
  syncer.join("c", 12.0)
  assert syncer.next("c", 12.0).task == lost.task
  assert syncer.join("b", 13.0) == 3  # as a new learner
  new = syncer.next("b", 13.0)
  with pytest.raises(
    UserError,
    match=re.escape(
      f"b: the result of work {lost.number} is stale: it is not expected of "
      f"this learner, but that of work {new.number}; ask for the next work."
    ),
  ):
    syncer.contribute("b", lost.number, {}, TOKENS, 13.0)


def test_a_late_learner_begins_with_the_outer_parameters_of_all_fragments():
  syncer = make()
  syncer.join("a", 0.0)
  syncer.join("b", 0.0)
  for _ in range(3):
    send(syncer, "a", 1.0)
    send(syncer, "b", 1.0)
    syncer.tick(1.0)
  syncer.join("c", 2.0)
  work = syncer.next("c", 2.0)
  assert (work.takes, work.begins, work.task) == ((0, 1), True, 6)
  # It sends the fragment that the others will send when it has ended its task.
  assert work.sends == (0,)
  assert syncer.next("a", 2.0).sends == (1,)


def test_a_result_that_is_not_finite_is_named_and_its_learner_joins_again():
  syncer = make(ONE)
  syncer.join("a", 0.0)
  work = syncer.next("a", 0.0)
  moved = arrays(1) | {NAMES[2]: np.full(SHAPE, np.nan, np.float32)}
  with pytest.raises(UserError, match=r"a: layer_001/mlp/in of work 0 is not"):
    syncer.contribute("a", work.number, moved, TOKENS, 0.0)
  assert not syncer.members
  syncer.join("a", 1.0)
  again = syncer.next("a", 1.0)
  assert (again.task, again.begins) == (work.task, True)


def test_answers_that_got_lost_are_given_again():
  syncer = make(ONE)
  for member in "ab":
    syncer.join(member, 0.0)
  one, two = (syncer.next("a", 0.0) for _ in range(2))
  assert (one.task, one.begins) == (two.task, two.begins) == (0, True)
  moved = arrays(1)
  for _ in range(2):
    syncer.contribute("a", two.number, moved, TOKENS, 1.0)
  send(syncer, "b", 1.0)
  syncer.tick(1.0)
  assert syncer.num_done == 2


def test_a_state_continues_and_repeats_what_was_not_merged():
  syncer = make(ONE)
  for member in "abc":
    syncer.join(member, 0.0)
    syncer.next(member, 0.0)
  send(syncer, "a", 1.0)
  state = syncer.state
  assert state["again"] == [0, 1, 2]
  resumed = make(ONE, state=state)
  assert resumed.num_done == 0
  assert resumed.join("a", 0.0) == 3
  assert resumed.next("a", 0.0).task == 0


def test_a_resumed_run_repeats_tasks_of_which_a_fragment_was_not_sent():
  """A learner has these changes, and begins again from the outer parameters."""
  syncer = make(quorum=1, grace_secs=0.0, num_tasks=4)
  syncer.join("a", 0.0)
  send(syncer, "a", 1.0)  # fragment 0
  (merge,) = syncer.tick(1.0)
  assert (merge["fragment"], syncer.num_done) == (0, 0)
  state = syncer.state
  assert (state["next_task"], state["again"]) == (1, [0])
  resumed = make(quorum=1, grace_secs=0.0, num_tasks=4, state=state)
  resumed.join("a", 0.0)
  assert resumed.next("a", 0.0).task == 0
  send(syncer, "a", 2.0)  # fragment 1, with the change of both tasks
  syncer.tick(2.0)
  assert syncer.num_done == 1
  assert syncer.state["again"] == [1]


def test_a_grace_window_may_follow_the_time_of_tasks():
  """Half the median of the learners' slowest tasks, here of 2 and 6 seconds."""
  syncer = make(ONE, grace_secs=None)
  for member in "abc":
    syncer.join(member, 0.0)
  numbers = {x: syncer.next(x, 0.0).number for x in "abc"}
  for member, secs in (("a", 2.0), ("b", 6.0)):
    given = member, numbers[member], arrays(1), TOKENS, secs
    syncer.contribute(*given)
  assert not syncer.tick(7.9)
  (merge,) = syncer.tick(8.0)
  assert merge["learners"] == [0, 1]


@pytest.mark.parametrize("quorum", [1, 2])
@pytest.mark.parametrize("overlaps", [False, True])
def test_every_task_is_merged_once_whoever_leaves_or_joins(quorum, overlaps):
  """Random speeds, crashes and joins; the run ends, and events tell it all."""
  for seed in range(5):
    rng = np.random.default_rng(seed)
    events: list = []
    syncer = make(
      quorum=quorum,
      events=events,
      num_tasks=23,
      overlaps=overlaps,
      lost_secs=10.0,
    )
    now, busy, joined = 0.0, {}, 0
    while not syncer.is_done:
      now += 0.5
      assert now < 2000, "the run does not end"
      if len(busy) < 2 or (len(busy) < 4 and rng.random() < 0.02):
        member, joined = f"learner/{joined}", joined + 1
        syncer.join(member, now)
        busy[member] = None, 0.0, rng.uniform(0.2, 6.0)
      for member, (work, end, secs) in list(busy.items()):
        if rng.random() < 0.01:
          del busy[member]  # it crashes
        elif work is None:
          found = syncer.next(member, now)
          if found not in (WAIT, DONE):
            busy[member] = found, now + secs, secs
        elif now >= end:
          names = [x for i in work.sends for x in FRAGMENTS[i]]
          moved = {x: np.ones(SHAPE, np.float32) for x in names}
          syncer.contribute(member, work.number, moved, TOKENS, now)
          busy[member] = None, 0.0, secs
      syncer.tick(now)
    of_work = {x["work"]: x for x in events if x["event"] == "contribution"}
    tasks = [
      x["task"]
      for x in events
      if x["event"] == "work" and x["number"] in of_work
    ]
    done = sorted(x for x in tasks if x is not None)
    assert done == list(range(23))
    merges = [x for x in events if x["event"] == "merge"]
    assert [x["merge"] for x in merges] == list(range(1, len(merges) + 1))
